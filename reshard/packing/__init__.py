"""Packing: a source resolved and laid out, written whole or in parts, and pushed.

Not `pack`: `reshard.pack` is the function.
"""
