"""Transforms of stored values: casts and dequantization. Only `arithmetic` imports numpy."""
