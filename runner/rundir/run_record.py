"""`run.json` in the log folder: which run this is and with which options; and how a run's folder is found. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.errors import LogError
from manifests.store import write_file

RUN_NAME = "run.json"
DEFAULT_RUNS = Path("runner-log")  # has a folder for each run started without --log-dir
LATEST = "latest"

# A run as JSON: `id`, `began`, `name`, `manifest`, `checkpoint`, `versions`, and `launches`, one for each start.
Run = Mapping[str, Any]


def read_record_of(log_dir: Path) -> dict[str, Any] | None:
    """Return the run record of a folder; None if there is none that can be read."""
    try:
        document = json.loads((log_dir / RUN_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and isinstance(document.get("id"), str) else None


def run_id(log_dir: Path) -> str:
    """Return the unique id of this folder's run; empty if it has none."""
    record = read_record_of(log_dir)
    return str(record["id"]) if record else ""


def check_same_run(named: object, log_dir: Path, where: str) -> None:
    """Check that a file of a log folder, which names the run that has written it, is of the folder's run.

    Raises:
        LogError: it is of another run.
    """
    if not isinstance(named, str) or not named:
        return
    expected = run_id(log_dir)
    if expected not in ("", named):
        problem = f"is of run {named[:32]}, and {RUN_NAME} beside it of run {expected[:32]}"
        hint = "copy log folders whole: a file of another run was moved here, or this run's was lost"
        raise LogError(where, problem, hint, code="log.other-run")


def write_run(log_dir: Path, run: Run) -> None:
    """Write a run record.

    Raises:
        OSError: it cannot be written; an older record is unchanged.
    """
    write_file(log_dir / RUN_NAME, (json.dumps({"version": 1, **run}, indent=2, default=str) + "\n").encode())


def note_resolved(log_dir: Path, resolved: Mapping[str, Any]) -> None:
    """Add the resolved options (from flags, checkpoint and number of ranks) to the record of a run's last launch."""
    run = read_record_of(log_dir)
    if run is None or not run.get("launches"):
        return
    run["launches"][-1]["resolved"] = dict(resolved)
    with contextlib.suppress(OSError):  # training does not depend on it
        write_run(log_dir, run)


def config_of(run: Run | None) -> dict[str, Any]:
    """Return what identifies a run, flat: of its last launch the resolved options, model, host and versions.

    Fields that a damaged record lacks are left out.
    """
    if run is None:
        return {}
    launches = run.get("launches")
    launch = _object(launches[-1]) if isinstance(launches, list) and launches else {}
    manifest, argv = _object(launch.get("manifest")), launch.get("argv")
    facts = {
        "run": run.get("id"),
        "name": run.get("name"),
        "manifest": manifest.get("path"),
        "manifest_digest": manifest.get("digest"),
        "command": shlex.join(map(str, argv)) if isinstance(argv, list) else None,
        "host": launch.get("host"),
        **{f"version/{package}": number for package, number in _object(launch.get("versions")).items()},
    }
    options = _object(launch.get("resolved")) or _object(launch.get("options"))
    return {name: value for name, value in {**options, **facts}.items() if value is not None}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def find_run(path: Path) -> Path:
    """Return the folder of one run: `path` itself, or the latest run in it."""
    latest = path / LATEST
    return path / os.readlink(latest) if latest.is_symlink() and latest.is_dir() else path


def link_latest(log_dir: Path) -> None:
    """Point the link `latest`, beside a run's folder, to it; a file of that name that is not a link is kept."""
    latest = log_dir.parent / LATEST
    if os.path.lexists(latest) and not latest.is_symlink():
        return
    fresh = latest.with_name(f".{LATEST}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(log_dir.name)
        fresh.replace(latest)
