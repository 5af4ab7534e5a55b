"""Bundles to parameters: each rank reads what it holds and nothing else."""
