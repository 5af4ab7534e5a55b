"""Which run a log folder is of: `run.json`, with what it was asked for; and the folder that a user means. No torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.store import write_file

__all__ = [
    "DEFAULT_RUNS",
    "LATEST",
    "RUN_NAME",
    "find_run",
    "link_latest",
    "note_resolved",
    "read_record_of",
    "run_id",
    "write_run",
]

RUN_NAME = "run.json"
DEFAULT_RUNS = Path("runner-log")  # of runs that were given no folder, each in one of its own
LATEST = "latest"

# A run as JSON: `id`, `began`, `name`, `manifest`, `checkpoint`, `versions`, and a launch for each time it was started.
Run = Mapping[str, Any]


def read_record_of(log_dir: Path) -> dict[str, Any] | None:
    """Return what a folder says of its run; None where it says nothing that can be read."""
    try:
        found = json.loads((log_dir / RUN_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("id"), str) else None


def run_id(log_dir: Path) -> str:
    """Return the name that tells this folder's run from all others; empty where it has none."""
    found = read_record_of(log_dir)
    return str(found["id"]) if found else ""


def write_run(log_dir: Path, run: Run) -> None:
    """Write what a run is.

    Raises:
        OSError: it cannot be written; an older one is as it was.
    """
    write_file(log_dir / RUN_NAME, (json.dumps({"version": 1, **run}, indent=2, default=str) + "\n").encode())


def note_resolved(log_dir: Path, resolved: Mapping[str, Any]) -> None:
    """Add to a run's last launch what became of its options, with a checkpoint's and the number of ranks known."""
    run = read_record_of(log_dir)
    if run is None or not run.get("launches"):
        return
    run["launches"][-1]["resolved"] = dict(resolved)
    with contextlib.suppress(OSError):  # the run does not depend on it
        write_run(log_dir, run)


def find_run(path: Path) -> Path:
    """Return the folder of one run: the one that is named, or the latest of those in it."""
    latest = path / LATEST
    return path / os.readlink(latest) if latest.is_symlink() and latest.is_dir() else path


def link_latest(log_dir: Path) -> None:
    """Let `latest`, beside a run's folder, lead to it; what is called so and is no link stays."""
    latest = log_dir.parent / LATEST
    if os.path.lexists(latest) and not latest.is_symlink():
        return
    fresh = latest.with_name(f".{LATEST}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(log_dir.name)
        fresh.replace(latest)
