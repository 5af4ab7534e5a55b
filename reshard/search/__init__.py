"""Search for the layouts, schedules and parallel degrees with which a number of GPUs train a model fastest."""
