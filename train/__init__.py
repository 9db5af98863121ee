"""Complete programs to copy from; example code that the wheel does not ship."""
