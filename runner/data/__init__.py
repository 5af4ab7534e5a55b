"""Text to batches of sequences, in whatever order, from any place on."""
