"""The contract: what is on disk, and what a model's config promises to be there."""
