"""torchrun with a watch: what a node runs, and how it names the rank that failed first."""
