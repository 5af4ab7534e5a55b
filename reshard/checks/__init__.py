"""Checks and comparisons: of any checkpoint, of bundles with their digests, of two checkpoints."""
