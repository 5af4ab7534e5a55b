"""Where ranks are started: on this machine, under Slurm, as a Kubernetes JobSet."""
