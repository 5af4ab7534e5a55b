"""Saving beside training, and going on from what was saved."""
