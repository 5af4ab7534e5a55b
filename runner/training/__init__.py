"""One optimizer step: mixed precision, activation checkpointing, tied weights, gradient clipping, AdamW."""
