"""Checkpoints that are there whole or not at all, and that open anywhere."""
