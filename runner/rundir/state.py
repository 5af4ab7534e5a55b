"""`state.json` in the log folder: how a run ended and after which step. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from manifests.errors import LogError
from manifests.store import write_file
from runner.rundir.run_record import check_same_run, run_id

STATE_NAME = "state.json"

# done: all steps are complete; stopped: by a signal, after a checkpoint; failed: `error`, with exit code `code`.
Ended = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """How the last run with this log folder ended; there is none while it runs, or if every process was killed."""

    step: int
    ended: Ended
    code: int = 0
    error: str = ""
    error_code: str = ""

    @property
    def word(self) -> str:
        """The state as Slurm names it."""
        return {"done": "COMPLETED", "stopped": "STOPPED", "failed": "FAILED"}[self.ended]


def write_state(log_dir: Path, state: RunState) -> None:
    write_file(
        log_dir / STATE_NAME,
        (json.dumps({"version": 1, **asdict(state), "run": run_id(log_dir)}) + "\n").encode(),
        is_durable=False,
    )


def clear_state(log_dir: Path) -> None:
    (log_dir / STATE_NAME).unlink(missing_ok=True)


def read_state(log_dir: Path) -> RunState | None:
    """Return how the last run ended; None if it left no state. That of another run is not this one's."""
    try:
        document = json.loads((log_dir / STATE_NAME).read_bytes())
        state = RunState(
            step=int(document["step"]),
            ended=document["ended"],
            code=int(document.get("code", 0)),
            error=str(document.get("error", "")),
            error_code=str(document.get("error_code", "")),
        )
        check_same_run(document.get("run"), log_dir, STATE_NAME)
    except (LogError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return state if state.ended in get_args(Ended) else None
