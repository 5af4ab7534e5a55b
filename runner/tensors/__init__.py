"""Tensors in memory: parts of them and their dtypes, DTensors, and the heap."""
