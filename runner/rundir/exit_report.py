"""How a rank's end is told: to the agent that started it, which prints one message for all, or else at once.

torchrun names a file for each rank's error (TORCHELASTIC_ERROR_FILE), and reads it when the rank has ended by itself,
but not when a signal has told torchrun to stop the ranks. So the agent has a folder, where each leaves its ending, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from manifests.errors import RankError, UnreachableError, UserError, error_json

__all__ = ["AGENT", "REPORTS", "ExitReport", "Kind", "code_of", "read_report", "read_reports", "report_exit"]

logger = logging.getLogger("runner")
AGENT = "RUNNER_AGENT"  # the process id of an agent that prints what its ranks leave
REPORTS = "RUNNER_ENDINGS"  # that agent's folder
_KEY = "runner"

# failed: by what it met itself; lost: it waited in vain for another rank; stuck: none of its steps ended.
Kind = Literal["failed", "lost", "stuck"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitReport:
    """Why a rank ends, and its exit code."""

    kind: Kind
    code: int
    where: str
    problem: str
    hint: str = ""
    is_elsewhere: bool = False  # what another rank met, and tells as well
    error_code: str = ""  # the stable name of its kind, such as `shard.damaged`

    @property
    def error(self) -> UserError:
        """The error as it is said, with its code and its exit code."""
        error = UserError(self.where, self.problem, self.hint, code=self.error_code)
        error.exit_code, error.is_elsewhere = self.code, self.is_elsewhere
        return error


def code_of(error: UserError) -> int:
    """Give the exit code of the job that an error ends: what a rank could not read, another attempt may."""
    return RankError.exit_code if isinstance(error, UnreachableError) else error.exit_code


def report_exit(ending: ExitReport, *, echo: bool | Literal["json"] = True) -> None:
    """Leave an ending to this process's agent; where there is none, say it, if it is to be said `echo`."""
    if _leave(ending):
        _keep_to_files()
    elif echo == "json":
        with contextlib.suppress(OSError):  # nobody reads it, and the exit code tells
            print(error_json(ending.error), flush=True)
        return
    elif not echo:
        return
    logger.error("error: %s", ending.error)


def read_report(left: Mapping[str, Any]) -> ExitReport | None:
    """Read what a rank left in its error file; None: nothing of ours."""
    found = left.get(_KEY)
    if not isinstance(found, Mapping) or found.get("kind") not in get_args(Kind):
        return None
    texts = {name: str(found.get(name, "")) for name in ("where", "problem", "hint", "error_code")}
    is_elsewhere = found.get("is_elsewhere") is True
    return ExitReport(kind=found["kind"], code=int(found.get("code", 1)), is_elsewhere=is_elsewhere, **texts)


def read_reports(folder: Path) -> tuple[ExitReport, ...]:
    """Read what ranks left in their agent's folder, the first one first."""
    found = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_report(json.loads(path.read_bytes())))
    return tuple(ending for ending in found if ending is not None)


def _leave(ending: ExitReport) -> bool:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.environ.get(AGENT) != str(os.getppid()):
        return False
    # The rest is what torchrun itself reads.
    extra = {"py_callstack": str(ending.error), "timestamp": str(int(time.time()))}
    left = json.dumps({"message": {"message": str(ending.error), "extraInfo": extra}, _KEY: asdict(ending)})
    try:
        if folder := os.environ.get(REPORTS):
            _write(Path(folder) / f"{os.getpid()}.json", left)
        _write(Path(path), left)
    except OSError:  # a full disk must not take the message away
        return False
    return True


def _write(path: Path, text: str) -> None:
    # torchrun may kill this process at any moment: who reads finds a whole file or none.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _keep_to_files() -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if not isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
    root.addHandler(logging.NullHandler())  # with none at all, logging says it on stderr after all
