"""DeepSpeed's pipeline layers, ZeRO parts and Universal Checkpoints."""
