"""Our own bundles and training checkpoints, read through their manifest."""
