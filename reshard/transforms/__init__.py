"""Transforms of stored values: casts and dequantization. Only `arithmetic` and `encoders` import numpy."""
