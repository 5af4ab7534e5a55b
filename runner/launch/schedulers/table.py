"""The table of schedulers, each imported when it is used."""

from __future__ import annotations

from runner.launch.schedulers import Cluster, Scheduler


def scheduler_of(name: str) -> Scheduler:
    """Return the scheduler of a job record."""
    from runner.launch.schedulers import local

    return local if name == "local" else cluster_of(name)


def cluster_of(name: str) -> Cluster:
    """Return the scheduler of `--scheduler`."""
    if name == "slurm":
        from runner.launch.schedulers import slurm

        return slurm
    assert name == "jobset", name
    from runner.launch.schedulers import jobset

    return jobset
