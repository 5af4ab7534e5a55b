"""The on-disk format, and the tensors that a model's config promises to be there."""
