"""`runner list`: the runs below a folder, by the files of their log folders. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from manifests.errors import LaunchError, UserError
from runner.launch.verbs import find_status
from runner.rundir.records import DEFAULT_RUNS, JOB_NAME, read_state

_HEAD = ("name", "state", "step", "loss", "heartbeat", "layout", "folder")


@click.command(name="list")
@click.argument("runs", type=click.Path(path_type=Path), metavar="[DIR]", default=DEFAULT_RUNS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_runs(runs: Path, as_json: bool) -> None:
    """List the runs below DIR: their state, last step and loss, and how long ago their ranks were last heard of.

    DIR has the log folders of runs: by default runner-log.

    \b
    Example:
      runner list
    """
    rows = find_runs(runs)
    if as_json:
        click.echo(json.dumps({"version": 1, "runs": rows}))
        return
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def find_runs(runs: Path) -> list[dict[str, Any]]:
    """Return the status of every run whose log folder is in `runs`, or is `runs`: the newest launch first.

    A run whose scheduler does not answer, or that runs on another machine, has an error instead of a state.
    """
    records = [path for path in (runs / JOB_NAME, *runs.glob(f"*/{JOB_NAME}")) if path.is_file()]
    folders = [path.parent for path in records if path.parent == runs or not path.parent.is_symlink()]
    if not folders:
        hint = "name the folder in which the --log-dir of runs are, or launch one: runner launch MANIFEST"
        raise LaunchError(str(runs), "has no log folders of runs", hint, code="launch.no-record")
    return [_status(folder) for folder in sorted(folders, key=lambda path: -(path / JOB_NAME).stat().st_mtime)]


def _status(folder: Path) -> dict[str, Any]:
    try:
        return {"folder": str(folder), **find_status(folder)}
    except UserError as error:
        ended = read_state(folder)
        return {"folder": str(folder), "state": ended.word if ended else "UNKNOWN", "error": str(error)}


def _cells(run: Mapping[str, Any]) -> tuple[str, ...]:
    step, loss, beat = run.get("last_step"), run.get("last_loss"), run.get("last_heartbeat_s")
    return (
        run.get("name") or "-", run["state"],
        "-" if step is None else str(step) if run["num_steps"] is None else f"{step}/{run['num_steps']}",
        "-" if loss is None else f"{loss:.4f}", "-" if beat is None else _ago(time.time() - beat),
        run.get("layout") or "-", run["folder"],
    )  # fmt: skip


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
