"""Training checkpoints: state, saving beside training, history, resume."""
