"""DeepSpeed's layers of a PipelineModule, and Universal Checkpoints."""
