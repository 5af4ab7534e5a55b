"""runner eval and runner generate: a model that is only read."""
