"""One log folder per job: no other job may use it until that one has ended. No torch."""

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
from runner.rundir.heartbeat import SKEWED_S, read_beats
from runner.rundir.job_record import JOB_NAME, JobRecord, read_record
from runner.rundir.state import read_state
from stores.folders.lock import locking

_CLAIM = ".launch.lock"
_BEGINS_S = 60.0


@contextmanager
def claim_log_dir(log_dir: Path) -> Iterator[None]:
    """Keep other launches from using a log folder until this job is on record there.

    Raises:
        UserError: another launch or job uses it, see `check_free`.
    """
    with locking(log_dir / _CLAIM, f"--log-dir {log_dir}", "launches a job with it"):
        check_free(log_dir)
        yield


def check_free(log_dir: Path) -> None:
    """Check that the job that was last launched with this log folder has certainly ended.

    Two jobs would write the same state, heartbeats and metrics, and `job.json` would name only one of them.

    Raises:
        UsageError: it has not ended.
        LaunchError: its state is unknown.
    """
    if not (log_dir / JOB_NAME).exists():
        return
    where = f"--log-dir {log_dir}"
    try:
        record = read_record(log_dir)
        doing = _doing(record, log_dir)
    except UserError as error:
        raise LaunchError(
            where, f"another job may be using it: {error.where}: {error.problem}",
            f"choose another, or remove {log_dir / JOB_NAME} once that job has ended",
            code="launch.log-folder-in-use",
        ) from error  # fmt: skip
    if doing is not None:
        is_here = record.scheduler != "local" or record.host == socket.gethostname()
        end = "cancel it with runner cancel"
        if not is_here:
            end += f" on that machine (if it was killed, wait {SKEWED_S:.0f} s)"
        raise UsageError(where, doing, f"choose another, or {end}", code="launch.log-folder-in-use")


def _doing(record: JobRecord, log_dir: Path) -> str | None:
    """Say how a job uses its log folder; None: it has ended, or this is a copy of its folder."""
    from runner.launch.schedulers import jobset, slurm
    from runner.launch.schedulers import local_processes as processes

    own = os.path.dirname(record.output)
    if os.path.isdir(own) and not os.path.samefile(own, log_dir):
        return None
    if record.scheduler == "local":
        if record.host == socket.gethostname():
            return f"is used by a job of process {record.id}" if processes.is_running(record) else None
        newest_s = max((beat.time for beat in read_beats(log_dir)), default=0.0)
        is_alive = read_state(log_dir) is None and (newest_s > time.time() - SKEWED_S or _is_new(log_dir))
        return f"is used by a job of process {record.id} on {record.host}" if is_alive else None
    if record.scheduler == "slurm":
        queued = slurm.find_state(record)
        return None if queued.is_over else f"is used by slurm job {record.id}, which is {queued.word}"
    found = jobset.find_state(record)
    if not found.is_over:
        return f"is used by jobset job {record.id}, which is {found}"
    num_left = sum(phase in ("Pending", "Running") for phase in jobset.find_phases(record))  # they may still save
    return f"is used by {num_left} pods of jobset job {record.id} that have not ended yet" if num_left else None


def _is_new(log_dir: Path) -> bool:
    """Whether the job was recorded so recently that its ranks may have no heartbeat yet, by the file system's clock."""
    with suppress(OSError), TemporaryFile(dir=log_dir) as now:
        return os.fstat(now.fileno()).st_mtime - os.stat(log_dir / JOB_NAME).st_mtime < _BEGINS_S
    return False
