"""torch.distributed.checkpoint, with torchtitan's names or Hugging Face's."""
