"""Ranks as processes: world, watchdog, failing together, exit codes."""
