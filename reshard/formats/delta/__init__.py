"""Chains of versions of a model's weights: full ones, and deltas that store what changed since the version before."""
