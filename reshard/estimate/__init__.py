"""What a layout costs: FLOPs, step time, pipeline bubble and memory."""
