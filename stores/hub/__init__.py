"""The hub of Hugging Face: files read by ranges, folders uploaded as commits."""
