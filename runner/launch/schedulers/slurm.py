"""Slurm: write a batch script, submit it with sbatch, and query it with scontrol. No torch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from manifests.command.interpreter import module_command
from manifests.command.slurm import run_slurm, working_folder
from manifests.errors import UsageError, UserError
from runner.launch.job import Job
from runner.launch.schedulers.checks import check_mounts, check_sbatch_args, parse_signal, parse_time
from runner.rundir.job_record import JobRecord

_MOUNT = re.compile(r"/[^:,]*:(?P<target>/[^:,]*)(:[a-z+]+)?")  # as pyxis takes them, with its own flags


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmState:
    """The state of a job in Slurm: `RUNNING` or another of its states, the reason, nodes, and number of requeues."""

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


_FORGOTTEN = "FORGOTTEN"  # our word: Slurm keeps a job for MinJobAge after its end, by default 300 s
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
         "PREEMPTED", "TIMEOUT", _FORGOTTEN)  # fmt: skip


def render(job: Job) -> str:
    """Return the batch script of a job: options of sbatch, the environment of the ranks, and the command.

    Raises:
        UsageError: a bad time or mount, a signal that has no effect, or a --sbatch-arg that conflicts with the job.
    """
    _check_end(job)
    check_mounts(job.mounts, _MOUNT, "/FOLDER-OF-THE-NODE:/FOLDER")
    check_sbatch_args(job.sbatch_args)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    # Values may contain commas and spaces, which sbatch's own --export does not support.
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment]
    lines += [f"exec {shlex.join(_supervisor(job))}", ""]
    return "\n".join(lines)


def submit(job: Job) -> JobRecord:
    """Submit a job to Slurm.

    Raises:
        UserError: Slurm is not installed here, has too few nodes, or rejects the job.
    """
    script = render(job)
    _check_nodes(job)
    # On its command line as well: SBATCH_ACCOUNT and others in the environment override the script.
    flags = [word for option in _options(job) for word in shlex.split(option)]
    number = run_slurm(["sbatch", "--parsable", *flags], standard_input=script).strip().partition(";")[0]
    return JobRecord(scheduler="slurm", id=number, name=job.name, output=str(job.log_dir / f"slurm-{number}.out"))


def find_state(record: JobRecord) -> SlurmState:
    """Return the state of a job.

    Raises:
        UserError: Slurm does not answer.
    """
    try:
        shown = run_slurm(["scontrol", "show", "job", "-o", record.id])
    except UserError as error:
        if "Invalid job id" not in error.problem:
            raise
        return SlurmState(word=_FORGOTTEN, reason="Slurm no longer knows it", nodes="", num_requeues=0, exit_code=0)
    if _is_other_job(shown, record):
        return SlurmState(word=_FORGOTTEN, reason="another job has its ID", nodes="", num_requeues=0, exit_code=0)
    fields = dict(word.partition("=")[::2] for word in shown.split() if "=" in word)
    return SlurmState(
        word=fields.get("JobState", "UNKNOWN"),
        reason="" if fields.get("Reason") == "None" else fields.get("Reason", ""),
        nodes="" if fields.get("NodeList") == "(null)" else fields.get("NodeList", ""),
        num_requeues=int(fields.get("Restarts", "0")),
        exit_code=int(fields.get("ExitCode", "0:0").partition(":")[0]),
    )


def cancel(record: JobRecord) -> bool:
    """Cancel a job, and return whether Slurm still knew it; another job with the same ID is left alone."""
    if find_state(record).is_forgotten:
        return False
    run_slurm(["scancel", record.id])
    return True


def _is_other_job(shown: str, record: JobRecord) -> bool:
    """Whether Slurm shows another job with this ID, by its output: of another cluster, or after a reset."""
    output = shown.partition(" StdOut=/")[2]
    # Not every version of Slurm expands each %.
    return bool(output) and "%" not in output + record.output and f" StdOut={record.output}" not in shown


def _check_end(job: Job) -> None:
    """Check that a job with --signal has the time to save, and a folder to save to."""
    limit_s = None if job.time is None else parse_time(job.time)
    if job.signal is None:
        return
    before_s = parse_signal(job.signal)
    if limit_s is not None and before_s >= limit_s:
        raise UsageError(
            "--signal",
            f"expected less than the {limit_s} s of --time, found {before_s} s",
            code="launch.scheduler-value",
        )
    if job.options.checkpoint is None:
        raise UsageError(
            "--signal",
            "asks the ranks to save, but there is no --checkpoint",
            "add --checkpoint DIR after --",
            code="options.needs-checkpoint",
        )


def _check_nodes(job: Job) -> None:
    """Check that the partition has so many nodes: Slurm 22.05 would let the job wait forever."""
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
        raise UsageError("--nnodes", f"expected at most the nodes of a partition, found {job.nnodes}: partition {has}",
                         "use fewer nodes, or another --partition", code="launch.nodes")  # fmt: skip


def _options(job: Job) -> list[str]:
    given: Mapping[str, str | int | None] = {
        "--job-name": job.name,
        "--nodes": job.nnodes,
        "--ntasks-per-node": 1,
        "--chdir": working_folder(),
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
    """Return the output file for sbatch, which reads %% as %."""
    return str(job.log_dir).replace("%", "%%") + "/slurm-%j.out"


def _supervisor(job: Job) -> list[str]:
    command = [
        *module_command("runner.launch.supervisor"),
        "--nnodes", str(job.nnodes), "--nproc-per-node", str(job.nproc_per_node), "--restarts", str(job.restarts),
    ]  # fmt: skip
    if job.requeue:
        command.append("--requeue")
    if job.image is not None:
        command += ["--python", "python3"]  # the image's
    command += [f"--srun-arg={argument}" for argument in _container(job)]
    return [*command, str(job.manifest), "--", *job.training]


def _container(job: Job) -> list[str]:
    """Return the flags that the container plugin pyxis adds to srun."""
    if job.image is None:
        return []
    mounts = (f"--container-mounts={','.join(job.mounts)}",) if job.mounts else ()
    return [f"--container-image={job.image}", *mounts]
