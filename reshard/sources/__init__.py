"""Readers of sources: each returns a `Checkpoint` from headers alone."""
