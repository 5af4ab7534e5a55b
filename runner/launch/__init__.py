"""Starting torchrun: on this machine, under Slurm or on Kubernetes. No torch is imported here."""
