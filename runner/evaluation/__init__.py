"""runner eval and runner generate: a packed model that is only read."""
