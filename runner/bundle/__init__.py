"""Manifests and their shards as a rank opens them: local, remote, or cached on the node. No torch."""
