"""The tensor table of a checkpoint: stored, lazy and sliced tensors, and the source index."""
