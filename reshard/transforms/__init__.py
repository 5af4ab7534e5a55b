"""Transforms of stored values: casts and dequantization. Only arithmetic.py imports numpy."""
