"""Readers of what people have: each gives a `Checkpoint` from headers alone."""
