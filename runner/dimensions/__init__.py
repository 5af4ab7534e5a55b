"""Ranks beyond the stages: replicas, shards, tensor parallelism, and what does not go together."""
