"""The formats of checkpoints: each folder reads, names and writes one, from headers alone."""
