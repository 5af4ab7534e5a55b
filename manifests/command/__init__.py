"""What both commands share: their console, signals, sizes, colors, and the words of Slurm and Kubernetes."""
