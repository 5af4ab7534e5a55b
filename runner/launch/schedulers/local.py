"""Jobs on this machine, by the process that launched them. No torch.

# Note [Which process]
Process IDs are reused. A job record also has the start time of its process, as the kernel counts it, the boot ID and
the PID namespace: another process with the same ID is not the job, and one of another container, or of a machine of the
same name, cannot be looked up here. Heartbeats tell whether that runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from manifests.errors import LaunchError
from runner.launch.schedulers import JobState, code_of_state, follow_file, print_file
from runner.rundir.records import (
    JOB_NAME,
    SKEWED_S,
    JobRecord,
    launcher_heartbeat_path,
    log_path,
    read_beats,
    read_state,
)
from stores.folders.lock import Process, birth_of, pid_namespace

_POLL_S = 0.1
_KILL_S = 10.0
_BEGINS_S = 60.0  # importing torch may keep the launcher's heartbeats back


def record_here(log_dir: Path, name: str) -> JobRecord:
    """Return the record of a job that this process runs, also after an exec."""
    pid = os.getpid()
    return JobRecord(
        scheduler="local", id=str(pid), name=name, output=str(log_path(log_dir.resolve(), 0)),
        host=socket.gethostname(), birth=birth_of(pid) or "", namespace=pid_namespace(),
    )  # fmt: skip


def process_of(record: JobRecord) -> Process:
    """Return the process that launched a job; see Note [Which process]."""
    namespace = record.namespace or pid_namespace()  # older records have none
    return Process(host=record.host, pid=int(record.id), birth=record.birth, namespace=namespace)


def find_state(record: JobRecord, log_dir: Path) -> JobState:
    """Return RUNNING, or how a job of this machine ended; KILLED where there is no `state.json`."""
    process = process_of(record)
    _check_host(process)
    if process.is_alive if process.is_local else _has_heartbeat(log_dir):
        return JobState(word="RUNNING", nodes=record.host)
    state = read_state(log_dir)
    return JobState(word=state.word if state else "KILLED", exit_code=code_of_state(state), nodes=record.host)


def use_of(record: JobRecord, log_dir: Path) -> str | None:
    """Return how a job that has not ended uses its log folder."""
    process = process_of(record)
    if process.is_local:
        return f"is used by a job of process {record.id}" if process.is_alive else None
    is_starting = read_state(log_dir) is None and _is_recent(log_dir / JOB_NAME, _BEGINS_S)
    is_alive = is_starting or _has_heartbeat(log_dir)
    return f"is used by a job of process {record.id} on {record.host}" if is_alive else None


print_output, follow_output = print_file, follow_file


def cancel(record: JobRecord, *, is_forced: bool) -> bool:
    """Ask a job of this machine to save and end; with `is_forced`, kill it and its ranks. Return whether it ran."""
    process = process_of(record)
    _check_host(process)
    if not process.is_local and _has_heartbeat(Path(record.output).parent):
        problem = f"runs in another container of {record.host}, or on another machine of that name"
        raise LaunchError(f"job {record.id}", problem, "run the command there", code="launch.other-host")
    if not (process.is_local and process.is_alive):
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


def _has_heartbeat(log_dir: Path) -> bool:
    """Whether a job has not ended, judging by its last heartbeat."""
    newest_s = max((beat.time for beat in read_beats(log_dir)), default=0.0)
    is_recent = newest_s > time.time() - SKEWED_S or _is_recent(launcher_heartbeat_path(log_dir), SKEWED_S)
    return is_recent and read_state(log_dir) is None


def _is_recent(path: Path, within_s: float) -> bool:
    """Whether a file was written or touched within so many seconds, by the file system's clock."""
    with contextlib.suppress(OSError), TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - os.stat(path).st_mtime < within_s
    return False


def _check_host(process: Process) -> None:
    if not process.is_local and process.host != socket.gethostname():
        raise LaunchError(f"job {process.pid}", f"runs on {process.host}, this is {socket.gethostname()}",
                        "run the command there", code="launch.other-host")  # fmt: skip


def _descendants(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, thread.read_text().split()):
                yield child
                yield from _descendants(child)
