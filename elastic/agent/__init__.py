"""The process per host: starts, watches and fences workers. Never imports torch."""
