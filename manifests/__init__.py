"""The on-disk format, and the tensors that a model's config promises to be there."""

__version__ = "0.1.0"  # of all packages; to read it from installed metadata takes 4 % of the start of a pack
