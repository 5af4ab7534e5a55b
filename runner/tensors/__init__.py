"""Tensors in memory: regions, local shards, DTensors, huge pages, pinned blocks."""
