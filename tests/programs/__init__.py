"""Small training functions that tests run in real workers."""
