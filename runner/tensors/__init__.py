"""Tensors in memory: dtypes, regions, local shards, DTensors, huge pages, pinned blocks."""
