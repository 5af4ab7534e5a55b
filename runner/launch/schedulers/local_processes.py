"""Jobs on this machine: their state and cancellation, by the process that launched them. No torch.

# Note [Which process]
Process IDs are reused. A job record also has the start time of its process, as the kernel counts it, and the boot ID:
another process with the same ID is not the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from manifests.errors import LaunchError
from runner.rundir.heartbeat import log_path
from runner.rundir.job_record import JobRecord
from runner.rundir.state import read_state
from stores.folders.lock import birth_of

_POLL_S = 0.1
_KILL_S = 10.0


def record_here(log_dir: Path, name: str) -> JobRecord:
    """Return the record of a job that this process runs, also after an exec."""
    pid = os.getpid()
    return JobRecord(
        scheduler="local", id=str(pid), name=name, output=str(log_path(log_dir.resolve(), 0)),
        host=socket.gethostname(), birth=birth_of(pid) or "",
    )  # fmt: skip


def is_running(record: JobRecord) -> bool:
    """Whether the process that launched a job still runs, see Note [Which process]."""
    return birth_of(int(record.id)) == record.birth


def find_state(record: JobRecord, log_dir: Path) -> str:
    """Return the state of a job of this machine: RUNNING, or how it ended; KILLED where there is no `state.json`.

    Raises:
        UserError: it runs on another machine.
    """
    _check_host(record)
    if is_running(record):
        return "RUNNING"
    state = read_state(log_dir)
    return state.word if state else "KILLED"


def cancel(record: JobRecord, *, is_forced: bool) -> bool:
    """Ask a job of this machine to save and end; with `is_forced`, kill it and its ranks. Return whether it ran.

    Raises:
        UserError: it runs on another machine, or belongs to someone else.
    """
    _check_host(record)
    if not is_running(record):
        return False
    launcher = int(record.id)
    ranks = list(_descendants(launcher)) if is_forced else []
    for pid in (launcher, *ranks):
        try:
            os.kill(pid, signal.SIGKILL if is_forced else signal.SIGTERM)
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise LaunchError(f"process {pid}", "belongs to another user", code="launch.not-our-process") from error
    deadline_s = time.monotonic() + _KILL_S
    while is_forced and time.monotonic() < deadline_s and any(map(birth_of, (launcher, *ranks))):
        time.sleep(_POLL_S)
    return True


def _check_host(record: JobRecord) -> None:
    if record.host != socket.gethostname():
        raise LaunchError(f"job {record.id}", f"runs on {record.host}, this is {socket.gethostname()}",
                        "run the command there", code="launch.other-host")  # fmt: skip


def _descendants(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, thread.read_text().split()):
                yield child
                yield from _descendants(child)
