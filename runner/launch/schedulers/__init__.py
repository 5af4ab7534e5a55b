"""Where jobs run: this machine, Slurm and Kubernetes, behind one protocol. No torch.

A module of this package is a scheduler: its functions are those of `Scheduler`, and of `Cluster` if jobs are submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manifests.errors import UsageError
from runner.launch.job import Job
from runner.rundir.records import JobRecord, RunState

POLL_S = 1.0
_CODES = {"COMPLETED": 0, "STOPPED": 130, "KILLED": 5}

Print = Callable[[str], object]
Poll = Callable[[], int | None]  # returns the exit code of a job that has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The state of a job in the words of its scheduler; `exit_code` is None while it waits or runs."""

    word: str
    exit_code: int | None = None
    reason: str = ""
    nodes: str = ""
    num_requeues: int = 0


class Scheduler(Protocol):
    """What `runner status`, `logs` and `cancel` ask of a scheduler, by the record of a job."""

    def find_state(self, record: JobRecord, log_dir: Path) -> JobState:
        """Return the state of a job; of one that the scheduler has forgotten, what its log folder says."""

    def use_of(self, record: JobRecord, log_dir: Path) -> str | None:
        """Return how a job that has not ended uses its log folder."""

    def print_output(self, record: JobRecord, path: Path, show: Print) -> bool:
        """Print what a job has written to `path` so far, or to its scheduler; return whether there is anything."""

    def follow_output(self, record: JobRecord, path: Path, show: Print, poll: Poll) -> int:
        """Print what a job writes until it has ended, and return its exit code."""

    def cancel(self, record: JobRecord, *, is_forced: bool) -> bool:
        """Cancel a job, and return whether it was still running, as far as the scheduler knows."""


class Cluster(Scheduler, Protocol):
    """A scheduler to which jobs are submitted."""

    def render(self, job: Job) -> str:
        """Return what is submitted."""

    def submit(self, job: Job) -> JobRecord:
        """Submit a job."""


def code_of_state(state: RunState | None) -> int:
    """Return the exit code of a job that has ended, by its `state.json`."""
    return 5 if state is None else _CODES.get(state.word, state.code)


def print_file(record: JobRecord, path: Path, show: Print) -> bool:
    """Print a file of a job, if it exists."""
    if not path.is_file():
        return False
    show(path.read_text(errors="replace"))
    return True


def follow_file(record: JobRecord, path: Path, show: Print, poll: Poll) -> int:
    """Print what is added to a file until the job has ended, and return its exit code."""
    position, code = 0, None
    while True:
        is_over = code is not None
        if path.is_file():
            with open(path, errors="replace") as stream:
                stream.seek(position)
                if text := stream.read():
                    show(text)
                position = stream.tell()
        if code is not None and is_over:
            return code
        code = poll()
        if code is None:
            time.sleep(POLL_S)


def refuse_force() -> UsageError:
    """Return why a job of a scheduler is not killed."""
    return UsageError(
        "--force",
        "is supported for jobs of this machine alone",
        "a scheduler kills ranks that do not end in time",
        code="launch.scheduler-flag",
    )
