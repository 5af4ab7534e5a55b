"""Exit reports: which rank exits, and why, for the agent that started it and prints one message for all ranks.

torchrun names a file for each rank's error (TORCHELASTIC_ERROR_FILE) and reads it when the rank exits by itself, but
not after a signal that makes torchrun stop the ranks. So each rank also leaves its report in a folder of the agent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from manifests.errors import RankError, UnreachableError, UserError, error_json
from manifests.schema import Manifest
from manifests.store import write_file

logger = logging.getLogger("runner")
AGENT = "RUNNER_AGENT"  # the process id of an agent that prints its ranks' reports
REPORTS = "RUNNER_EXIT_REPORTS"  # that agent's folder of reports
_STOPPING = "stopping"  # a file in that folder
_KEY = "runner"
# failed: an error of its own; lost: it timed out waiting for another rank; stuck: its step did not end.
FailureKind = Literal["failed", "lost", "stuck"]
_label: list[str] = []  # a process is one rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitReport:
    """Why a rank exits, and its exit code."""

    kind: FailureKind
    code: int
    where: str
    problem: str
    hint: str = ""
    is_elsewhere: bool = False  # another rank failed, and reports it as well
    error_code: str = ""  # such as `shard.digest-mismatch`

    @property
    def error(self) -> UserError:
        """The error to print, with its code and exit code."""
        error = UserError(self.where, self.problem, self.hint, code=self.error_code)
        error.exit_code, error.is_elsewhere = self.code, self.is_elsewhere
        return error


def code_of(error: UserError) -> int:
    """Return the exit code of a job that fails with this error: a restart may read what was unreachable now."""
    return RankError.exit_code if isinstance(error, UnreachableError) else error.exit_code


def report_exit(report: ExitReport, *, echo: bool | Literal["json"] = True) -> None:
    """Leave a report for this process's agent; without an agent, print it unless `echo` is false."""
    if _leave(report):
        _mute_terminal()
    elif echo == "json":
        with contextlib.suppress(OSError):  # nobody reads it, and the exit code says enough
            print(error_json(report.error), flush=True)
        return
    elif not echo:
        return
    logger.error("error: %s", report.error)


def read_report(document: Mapping[str, Any]) -> ExitReport | None:
    """Read the report in a rank's error file; None: it has none of ours."""
    fields = document.get(_KEY)
    if not isinstance(fields, Mapping) or fields.get("kind") not in get_args(FailureKind):
        return None
    texts = {name: str(fields.get(name, "")) for name in ("where", "problem", "hint", "error_code")}
    is_elsewhere = fields.get("is_elsewhere") is True
    return ExitReport(kind=fields["kind"], code=int(fields.get("code", 1)), is_elsewhere=is_elsewhere, **texts)


def read_reports(folder: Path) -> tuple[ExitReport, ...]:
    """Read the reports in an agent's folder, the oldest first."""
    reports = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError):
            reports.append(read_report(json.loads(path.read_bytes())))
    return tuple(report for report in reports if report is not None)


def note_stopping(folder: Path) -> None:
    """Note in an agent's folder that it was asked to stop its ranks."""
    with contextlib.suppress(OSError):  # ranks then wait less long for their step
        (folder / _STOPPING).touch()


def is_stopping() -> bool:
    """Return whether this process's agent was asked to stop, and none of its ranks exits with an error.

    Otherwise, SIGTERM means that another rank has exited.
    """
    folder = os.environ.get(REPORTS)
    return folder is not None and Path(folder, _STOPPING).exists() and not any(Path(folder).glob("*.json"))


def set_rank_label(rank: int, stages: Sequence[int] = ()) -> None:
    """Make every later error of this process also name its node, and its stages once they are known."""
    _label[:] = [place_of(rank, stages, socket.gethostname())]


def rank_label(rank: int) -> str:
    """Return this process's label: `rank 2, stage 2, node n1`, or `rank 2` before `set_rank_label`."""
    return _label[0] if _label else f"rank {rank}"


def place_of(rank: int, stages: Sequence[int], node: str) -> str:
    if not stages:
        return f"rank {rank}, node {node}"
    word = "stage" if len(stages) == 1 else "stages"
    return f"rank {rank}, {word} {', '.join(map(str, stages))}, node {node}"


def stages_of(manifest: Manifest, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the stages of a rank. Ranks that share their stages have consecutive numbers."""
    placement = manifest.placement
    return placement.stages_on(rank * placement.num_ranks // world_size)


def _leave(report: ExitReport) -> bool:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.environ.get(AGENT) != str(os.getppid()):
        return False
    # torchrun itself reads `message`.
    extra = {"py_callstack": str(report.error), "timestamp": str(int(time.time()))}
    message = {"message": str(report.error), "extraInfo": extra}
    data = json.dumps({"message": message, _KEY: asdict(report)}).encode()
    try:
        if folder := os.environ.get(REPORTS):
            write_file(Path(folder) / f"{os.getpid()}.json", data, is_durable=False)
        write_file(Path(path), data, is_durable=False)  # torchrun may kill this process at any moment
    except OSError:  # with a full disk, the message must still be printed
        return False
    return True


def _mute_terminal() -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if not isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
    root.addHandler(logging.NullHandler())  # without any handler, logging prints to stderr
