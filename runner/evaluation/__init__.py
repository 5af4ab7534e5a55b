"""runner eval: a packed model that is only read."""
