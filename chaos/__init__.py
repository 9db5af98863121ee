"""Faults on purpose, and the local servers that they are tried against."""
