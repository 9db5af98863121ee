"""Who is in the World. Never imports torch."""
