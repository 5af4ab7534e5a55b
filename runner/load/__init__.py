"""Bundles to parameters: each rank reads its own stages' tensors and nothing else."""
