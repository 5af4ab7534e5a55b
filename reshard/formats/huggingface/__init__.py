"""Hugging Face folders: safetensors or torch shards with an index and a config.json."""
