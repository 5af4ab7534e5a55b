"""From a manifest to a training pipeline: each rank builds, loads and trains its own stages."""
