"""Fuzz target: a job file. What is read gives training options and a job that both schedulers can render."""

from __future__ import annotations

import contextlib

import click

from manifests.errors import UserError
from runner.config.flags import parse_training
from runner.launch.command import launch, training_words
from runner.launch.job import Job, read_environment
from runner.launch.nodes import parse_nnodes
from runner.launch.schedulers import jobset, slurm
from tests.fuzz.folder import scratch

_PLAIN = ("partition", "account", "qos", "time", "signal", "restarts", "requeue")


def check(text: bytes) -> None:
    """Raise AssertionError unless the file is refused in a sentence, or leads to something to submit."""
    folder = scratch("job")
    (folder / "job.toml").write_bytes(text)
    try:
        _render(str(folder / "job.toml"))
    except (UserError, click.UsageError):
        return


def _render(path: str) -> None:
    with launch.make_context("launch", ["--job", path, "--dry-run"]) as context:
        asked = context.params
        training = training_words(
            context, quiet=asked["quiet"], log_dir=asked["log_dir"], stage_to_local=asked["stage_to_local"]
        )
        options = parse_training(training)
        job = Job(
            manifest="/packed/manifest.json",
            training=training,
            name="packed" if asked["name"] is None else asked["name"],
            log_dir=options.log_dir.resolve(),
            nnodes=parse_nnodes(asked["nnodes"]),
            nproc_per_node=asked["nproc_per_node"] or 2,
            environment=read_environment(asked["env"]),
            image=asked["image"],
            mounts=asked["mount"],
            sbatch_args=asked["sbatch_arg"],
            **{field: asked[field] for field in _PLAIN},
        )
    for scheduler in (slurm, jobset):
        with contextlib.suppress(UserError):
            scheduler.render(job).encode()


def seeds() -> tuple[bytes, ...]:
    """Return a job for each scheduler, and one of this machine."""
    return (
        b'manifest = "packed"\n[training]\nsteps = 10\ndata = ["a/", "b/"]\ndata-weight = [1, 2.5]\npack = false\n',
        b'scheduler = "slurm"\nnnodes = 2\ntime = "1:00:00"\nsignal = "USR2@60"\nrequeue = true\nrestarts = 2\n'
        b'env = ["A=1"]\nsbatch-arg = ["--gpus=8"]\nlog-dir = "log"\n[training]\ndata = "text/"\ncheckpoint = "c"\n'
        b'checkpoint-every = 5\nresume = "auto"\nseed = 3\nlr = 1e-3\nschedule = "1F1B"\n',
        b'scheduler = "jobset"\nimage = "a/b:1"\nmount = ["claim:/data"]\nname = "j"\nnproc-per-node = 2\n'
        b'[training]\ndata = "/data/t"\nlog-dir = "/data/log"\ntrace = "2-3"\nac = "full"\ndp-shard = "auto"\n',
    )
