"""One optimizer step: precision, recomputation, ties, the norm, AdamW."""
