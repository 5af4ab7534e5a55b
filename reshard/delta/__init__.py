"""Publish weights as a chain of versions, and keep a folder at one of them."""
