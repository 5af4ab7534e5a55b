"""The log folder of a job: no other job may have it before that one is over. No torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from manifests.errors import (
    LaunchError,
    UsageError,
    UserError,
)
from manifests.lockfile import locking
from runner.rundir.heartbeat import SKEWED_S, read_beats
from runner.rundir.job_record import JOB_NAME, JobRecord, read_record
from runner.rundir.state import read_state

__all__ = ["check_free", "taking"]

_CLAIM = ".launch.lock"
_BEGINS_S = 60.0


@contextmanager
def taking(log_dir: Path) -> Iterator[None]:
    """Keep other launches away from a log folder until this one's job is on record there.

    Raises:
        UserError: another launch or job has it, see `check_free`.
    """
    with locking(log_dir / _CLAIM, f"--log-dir {log_dir}", "launches a job with it"):
        check_free(log_dir)
        yield


def check_free(log_dir: Path) -> None:
    """Raise unless the job that was last launched with this log folder is over, and for certain.

    Two jobs would write one state, heartbeats and metrics, and `job.json` would name one of them.

    Raises:
        UsageError: it is not over.
        InputError: whether it is over cannot be told.
    """
    if not (log_dir / JOB_NAME).exists():
        return
    where = f"--log-dir {log_dir}"
    try:
        record = read_record(log_dir)
        doing = _doing(record, log_dir)
    except UserError as error:
        raise LaunchError(
            where, f"another job may have it, which cannot be told: {error.where}: {error.problem}",
            f"take another, or remove {log_dir / JOB_NAME} when that job is over",
            code="launch.log-folder-in-use",
        ) from error  # fmt: skip
    if doing is not None:
        is_here = record.scheduler != "local" or record.host == socket.gethostname()
        end = "runner cancel it" if is_here else f"runner cancel it there; wait {SKEWED_S:.0f} s where it was killed"
        raise UsageError(where, doing, f"take another, or {end}", code="launch.log-folder-in-use")


def _doing(record: JobRecord, log_dir: Path) -> str | None:
    """Say what a job does with its log folder; None: it is over, or has another one, of which this is a copy."""
    from runner.launch import jobset, slurm
    from runner.launch import local_processes as processes

    own = os.path.dirname(record.output)
    if os.path.isdir(own) and not os.path.samefile(own, log_dir):
        return None
    if record.scheduler == "local":
        if record.host == socket.gethostname():
            return f"process {record.id} runs a job with it" if processes.is_running(record) else None
        newest_s = max((beat.time for beat in read_beats(log_dir)), default=0.0)
        is_alive = read_state(log_dir) is None and (newest_s > time.time() - SKEWED_S or _is_new(log_dir))
        return f"process {record.id} on {record.host} runs a job with it" if is_alive else None
    if record.scheduler == "slurm":
        queued = slurm.find_state(record)
        return None if queued.is_over else f"slurm job {record.id} has it, and is {queued.word}"
    found = jobset.find_state(record)
    if not found.is_over:
        return f"jobset job {record.id} has it, and is {found}"
    num_left = sum(phase in ("Pending", "Running") for phase in jobset.find_phases(record))  # they may still save
    return f"{num_left} pods of jobset job {record.id} have not ended yet" if num_left else None


def _is_new(log_dir: Path) -> bool:
    """Whether the job was recorded so short ago that its ranks may not beat yet, by the file system's clock."""
    with suppress(OSError), TemporaryFile(dir=log_dir) as now:
        return os.fstat(now.fileno()).st_mtime - os.stat(log_dir / JOB_NAME).st_mtime < _BEGINS_S
    return False
