"""Slurm: a batch script that says all, handed to sbatch; what became of it, asked of scontrol. No torch."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import UsageError, UserError
from manifests.slurm import run_slurm
from runner.launch.job import Job
from runner.launch.scheduler_checks import check_mounts, check_sbatch_args, parse_signal, parse_time
from runner.rundir.job_record import JobRecord

__all__ = ["SlurmState", "cancel", "find_state", "render", "submit"]

_MOUNT = re.compile(r"/[^:,]*:(?P<target>/[^:,]*)(:[a-z+]+)?")  # as pyxis takes them, with its own flags


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmState:
    """What Slurm says of a job: `RUNNING` or another of its words, why, where, and how often it was queued again."""

    word: str
    reason: str
    nodes: str
    num_requeues: int
    exit_code: int

    @property
    def is_over(self) -> bool:
        return self.word in _OVER

    @property
    def is_forgotten(self) -> bool:
        return self.word == _FORGOTTEN


_FORGOTTEN = "FORGOTTEN"  # our word: Slurm keeps a job for MinJobAge after its end, 300 s if nobody says otherwise
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
         "PREEMPTED", "TIMEOUT", _FORGOTTEN)  # fmt: skip


def render(job: Job) -> str:
    """Give the batch script of a job: what sbatch is told, what the ranks see, and what runs.

    Raises:
        UsageError: a time or a mount that is none, a signal that comes to nothing, or a line for sbatch that undoes
            what the job is planned with.
    """
    _check_end(job)
    check_mounts(job.mounts, _MOUNT, "/FOLDER-OF-THE-NODE:/FOLDER")
    check_sbatch_args(job.sbatch_args)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    # Values hold commas and spaces: sbatch's own --export could not carry them.
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment]
    lines += [f"exec {shlex.join(_supervisor(job))}", ""]
    return "\n".join(lines)


def submit(job: Job) -> JobRecord:
    """Hand a job to Slurm.

    Raises:
        UserError: there is no Slurm here, it has too few nodes, or it refuses the job.
    """
    script = render(job)
    _check_nodes(job)
    # On its command line as well: SBATCH_ACCOUNT and its like in the environment win over what a script says.
    told = [word for option in _options(job) for word in shlex.split(option)]
    number = run_slurm(["sbatch", "--parsable", *told], standard_input=script).strip().partition(";")[0]
    return JobRecord(scheduler="slurm", id=number, name=job.name, output=str(job.log_dir / f"slurm-{number}.out"))


def find_state(record: JobRecord) -> SlurmState:
    """Ask Slurm what a job does.

    Raises:
        UserError: Slurm cannot be asked.
    """
    try:
        shown = run_slurm(["scontrol", "show", "job", "-o", record.id])
    except UserError as error:
        if "Invalid job id" not in error.problem:
            raise
        return SlurmState(word=_FORGOTTEN, reason="it ended long ago", nodes="", num_requeues=0, exit_code=0)
    if _is_anothers(shown, record):
        return SlurmState(word=_FORGOTTEN, reason="another has its number", nodes="", num_requeues=0, exit_code=0)
    fields = dict(word.partition("=")[::2] for word in shown.split() if "=" in word)
    return SlurmState(
        word=fields.get("JobState", "UNKNOWN"),
        reason="" if fields.get("Reason") == "None" else fields.get("Reason", ""),
        nodes="" if fields.get("NodeList") == "(null)" else fields.get("NodeList", ""),
        num_requeues=int(fields.get("Restarts", "0")),
        exit_code=int(fields.get("ExitCode", "0:0").partition(":")[0]),
    )


def cancel(record: JobRecord) -> bool:
    """End a job, and give whether Slurm still knew it: another that has got its number stays as it is."""
    if find_state(record).is_forgotten:
        return False
    run_slurm(["scancel", record.id])
    return True


def _is_anothers(shown: str, record: JobRecord) -> bool:
    """Whether what Slurm shows is of another job, with another output: of another cluster, or after a reset."""
    output = shown.partition(" StdOut=/")[2]
    # Not every version expands each %.
    return bool(output) and "%" not in output + record.output and f" StdOut={record.output}" not in shown


def _check_end(job: Job) -> None:
    """See that a job that is told of its end has the time, and something, to save."""
    limit_s = None if job.time is None else parse_time(job.time)
    if job.signal is None:
        return
    before_s = parse_signal(job.signal)
    if limit_s is not None and before_s >= limit_s:
        raise UsageError(
            "--signal",
            f"{before_s} s before the end is before the job begins: --time is {limit_s} s",
            code="launch.scheduler-value",
        )
    if job.options.checkpoint is None:
        raise UsageError(
            "--signal",
            "asks the ranks to save, and there is nothing to save to",
            "add --checkpoint DIR after --",
            code="options.needs-checkpoint",
        )


def _check_nodes(job: Job) -> None:
    """Raise where a job asks for more nodes than its partition has: Slurm 22.05 lets it wait for ever."""
    words = (line.split() for line in run_slurm(["scontrol", "show", "partition", "-o"]).splitlines())
    partitions = [dict(word.partition("=")[::2] for word in line) for line in words]
    partition = job.partition or os.environ.get("SBATCH_PARTITION")
    asked = set(partition.split(",")) if partition else None
    chosen = [
        fields for fields in partitions
        if (fields.get("Default") == "YES" if asked is None else fields.get("PartitionName") in asked)
    ]  # fmt: skip
    sizes = {fields["PartitionName"]: int(fields["TotalNodes"]) for fields in chosen if "TotalNodes" in fields}
    if sizes and max(sizes.values()) < job.nnodes:
        has = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise UsageError("--nnodes", f"{job.nnodes} nodes are asked for, and partition {has}",
                         "fewer nodes, or another --partition", code="launch.nodes")  # fmt: skip


def _options(job: Job) -> list[str]:
    given: Mapping[str, str | int | None] = {
        "--job-name": job.name,
        "--nodes": job.nnodes,
        "--ntasks-per-node": 1,
        "--chdir": str(Path.cwd()),
        "--output": _output(job),
        "--open-mode": "append",
        "--partition": job.partition,
        "--account": job.account,
        "--qos": job.qos,
        "--time": job.time,
        "--signal": job.signal,
    }
    options = [f"{flag}={shlex.quote(str(value))}" for flag, value in given.items() if value is not None]
    return [*options, "--requeue" if job.requeue else "--no-requeue", *job.sbatch_args]


def _output(job: Job) -> str:
    """Give the file that sbatch is told, which takes %% for a % of the folder's name."""
    return str(job.log_dir).replace("%", "%%") + "/slurm-%j.out"


def _supervisor(job: Job) -> list[str]:
    command = [
        sys.executable, "-m", "runner.launch.supervisor",
        "--nnodes", str(job.nnodes), "--nproc-per-node", str(job.nproc_per_node), "--restarts", str(job.restarts),
    ]  # fmt: skip
    if job.requeue:
        command.append("--requeue")
    if job.image is not None:
        command += ["--python", "python3"]  # the image's
    command += [f"--srun-arg={argument}" for argument in _container(job)]
    return [*command, str(job.manifest), "--", *job.training]


def _container(job: Job) -> list[str]:
    """Give the flags that the container plugin pyxis adds to srun."""
    if job.image is None:
        return []
    mounts = (f"--container-mounts={','.join(job.mounts)}",) if job.mounts else ()
    return [f"--container-image={job.image}", *mounts]
