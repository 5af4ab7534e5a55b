"""Ranks that share a stage: device mesh, FSDP, tensor parallelism."""
