"""`runner status`, `logs`, `cancel`, `report` and `list`, by the log folders of jobs: the latest, or the given one."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from manifests.command.console import table
from manifests.errors import (
    InputError,
    LaunchError,
    UsageError,
    UserError,
)
from runner.checkpoint.history import find_newest
from runner.config.declared import WholeNumber
from runner.launch.schedulers import Print
from runner.launch.schedulers.table import scheduler_of
from runner.report.read import check_fields, read_object
from runner.rundir.exit_report import place_of
from runner.rundir.records import (
    DEFAULT_RUNS,
    JOB_NAME,
    SKEWED_S,
    JobRecord,
    check_same_run,
    config_of,
    find_run,
    log_path,
    read_beats,
    read_job_record,
    read_run_record,
    read_state,
)

_LOG_DIR = click.argument(
    "log_dir", type=click.Path(path_type=Path), metavar="[LOG_DIR]", default=DEFAULT_RUNS,
    callback=lambda _, __, path: find_run(path),
)  # fmt: skip
_Answer = TypeVar("_Answer")

_WATCHED_S = 2.0  # between two looks at a job
_SILENT_S = 60.0  # a scheduler that is being restarted does not answer


@click.command()
@_LOG_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--watch", "is_watched", is_flag=True, help="Show it again when it changes, until the job ends.")
def status(log_dir: Path, as_json: bool, is_watched: bool) -> None:
    """Show the state of a launched job, its progress, and why it failed.

    LOG_DIR is the log folder of a run, by default the latest launched without --log-dir.

    \b
    Example:
      runner status runner-log/latest
    """
    if as_json and is_watched:
        problem = "conflicts with --json, which prints one object"
        raise UsageError("--watch", problem, "remove one of them", code="options.conflict")
    if as_json:
        click.echo(json.dumps(find_status(log_dir)))
        return
    hint = f"the job is not affected; watch it again with runner status {shlex.quote(str(log_dir))} --watch"
    poll = _Poll(lambda: _status_lines(find_status(log_dir)), hint)
    show_changes(poll.look if is_watched else poll.ask, is_repeated=is_watched)


def _status_lines(state: Mapping[str, Any]) -> tuple[bool, Sequence[str]]:
    """Return whether the job may still change, and what is shown of it."""
    why = f" ({state['reason']})" if state.get("reason") else ""
    where = f" on {state['nodes']}" if state.get("nodes") else ""
    again = f", requeued {state['requeues']} times" if state.get("requeues") else ""
    lines = [f"{state['name']}: {state['scheduler']} job {state['id']} is {state['state']}{why}{where}{again}"]
    if state["last_step"] is not None:
        loss = f", loss {state['last_loss']:.6f}" if state["last_loss"] is not None else ""
        saved = f", last checkpoint {_from_here(state['last_checkpoint'])}" if state["last_checkpoint"] else ""
        of = f" of {state['num_steps']}" if state["num_steps"] is not None else ""
        lines.append(f"step {state['last_step']}{of}{loss}{saved}")
    lines += [f"no heartbeat from {rank}" for rank in state["silent_ranks"]]
    lines += [f"error: {state['error']}"] if state["error"] else []
    return state["exit_code"] is None, lines


def _from_here(path: str) -> Path:
    """Return a path as it is typed in this folder, if it is below it."""
    here = Path.cwd()
    return Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)


@click.command()
@_LOG_DIR
@click.option("-f", "--follow", is_flag=True, help="Print new output until the job ends.")
@click.option("--rank", type=WholeNumber(min=0), metavar="R", help="Show only the log of this rank.")
def logs(log_dir: Path, follow: bool, rank: int | None) -> None:
    """Print the output of a launched job; for a job on this machine, that of rank 0.

    LOG_DIR is the log folder of a run, by default the latest launched without --log-dir.

    \b
    Example:
      runner logs --follow
    """
    show_logs(log_dir, lambda text: click.echo(text, nl=False), rank=rank, is_followed=follow)


@click.command()
@_LOG_DIR
@click.option("--force", is_flag=True, help="Kill a job of this machine at once, without saving.")
def cancel(log_dir: Path, force: bool) -> None:
    """Cancel a launched job; if it saves checkpoints, it saves one first.

    LOG_DIR is the log folder of a run, by default the latest launched without --log-dir.

    \b
    Example:
      runner cancel runner-log/latest
    """
    record = read_job_record(log_dir)
    was_running = scheduler_of(record.scheduler).cancel(record, is_forced=force)
    job = f"{record.scheduler} job {record.id} ({record.name})"
    click.echo(f"{log_dir}: cancelled {job}" if was_running else f"{log_dir}: {job} has ended already")


@click.command()
@_LOG_DIR
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", show_default="LOG_DIR/report.html", help="Page to write."
)
@click.option("--compare", type=click.Path(path_type=Path), metavar="LOG_DIR", help="Draw this run beside it.")
@click.option(
    "--perfetto",
    "trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the traced steps of all ranks as one .json file for ui.perfetto.dev, too.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
def report(log_dir: Path, out: Path | None, compare: Path | None, trace: Path | None, force: bool) -> None:
    """Write a run as one HTML page: loss, throughput and, for steps with --trace, the pipeline.

    LOG_DIR is the log folder of a run, by default the latest launched without --log-dir.

    \b
    Example:
      runner launch ./packed -- --data text/ --steps 100 --trace 20-30 && runner report
    """
    from runner.report.page import write_report, write_trace

    path = out or log_dir / "report.html"
    summary = write_report(log_dir, path, force=force, other_dir=compare)
    click.echo(f"{path}: {summary}")
    if trace is not None:
        num_steps = write_trace(log_dir, trace, force=force)
        click.echo(f"{trace}: {num_steps} traced steps; open it in https://ui.perfetto.dev")


def find_status(log_dir: Path) -> dict[str, Any]:
    """Return the status of a job: its state in the scheduler, its progress, and why it failed."""
    record = read_job_record(log_dir)
    state, ended = scheduler_of(record.scheduler).find_state(record, log_dir), read_state(log_dir)
    report: dict[str, Any] = {
        "version": 1, "scheduler": record.scheduler, "id": record.id, "name": record.name,
        "state": state.word, "exit_code": state.exit_code,
        "reason": state.reason, "nodes": state.nodes, "requeues": state.num_requeues,
    }  # fmt: skip
    has_failed = ended is not None and ended.ended == "failed"
    report["error"] = ended.error if ended and has_failed else None
    report["error_code"] = ended.error_code if ended and has_failed else None
    report["silent_ranks"] = _silent(log_dir) if state.word.upper() == "RUNNING" else []
    config = config_of(read_run_record(log_dir))
    report |= {"num_steps": config.get("steps"), "layout": config.get("layout")}
    report["last_heartbeat_s"] = max((beat.time for beat in read_beats(log_dir)), default=None)  # since the epoch
    report |= _progress(log_dir / "metrics.jsonl")
    first_step = config.get("first_step")
    if report["last_step"] is None and isinstance(first_step, int) and first_step > 1:
        report["last_step"] = first_step - 1  # of the checkpoint that was resumed
    # A checkpoint is committed before its line is written, which a kill may prevent.
    history = Path(str(config.get("checkpoint") or ""))
    if history.is_absolute() and report["last_step"]:
        with suppress(InputError, ValueError):  # a folder that only the nodes see, or no path
            newest = find_newest(history, report["last_step"])
            report["last_checkpoint"] = str(newest) if newest else report["last_checkpoint"]
    return report


def show_changes(look: Callable[[], tuple[bool, Sequence[str]] | None], *, is_repeated: bool) -> None:
    """Show the lines that `look` returns; if repeated, again when they change, while its first value is true.

    None means that nothing is known now, and what was shown stays.

    On a terminal the new lines replace the old ones.
    """
    shown: Sequence[str] = ()
    while True:
        may_change, lines = look() or (True, shown)
        columns = shutil.get_terminal_size().columns if is_repeated and sys.stdout.isatty() else 0
        if columns and shown and lines != shown:
            click.echo(f"\x1b[{len(shown)}F\x1b[J", nl=False)
        for line in lines if lines != shown else ():
            click.echo(line[:columns] if columns else line)
        shown = lines
        if not (is_repeated and may_change):
            return
        time.sleep(_WATCHED_S)


def show_logs(log_dir: Path, show: Print, *, rank: int | None, is_followed: bool) -> None:
    """Print the output of a job, or the log of one rank."""
    record = read_job_record(log_dir)
    path = Path(record.output) if rank is None else log_path(log_dir, rank)
    if is_followed:
        follow_job(record, path, show, log_dir)
    elif not scheduler_of(record.scheduler).print_output(record, path, show):
        raise _no_log(path, log_dir)
    ended = read_state(log_dir)
    if record.scheduler == "local" and ended is not None and ended.error:
        line = f"error: {ended.error}\n"  # it was printed on the terminal, and not to every log
        if not path.is_file() or line not in path.read_text(errors="replace"):
            show(line)


def follow_job(record: JobRecord, path: Path, show: Print, log_dir: Path) -> int:
    """Print the output of a job until it ends, and return its exit code."""
    scheduler = scheduler_of(record.scheduler)
    hint = f"the job is not affected; follow it again with runner logs {shlex.quote(str(log_dir))} -f"
    poll = _Poll(lambda: scheduler.find_state(record, log_dir).exit_code, hint)
    return scheduler.follow_output(record, path, show, poll.look)


class _Poll(Generic[_Answer]):
    """A job whose scheduler is polled by `ask`, and may fail to answer for a while; `hint` is for when it gives up."""

    def __init__(self, ask: Callable[[], _Answer], hint: str) -> None:
        self.ask, self._hint = ask, hint
        self._has_answered, self._silent_since_s = False, 0.0

    def look(self) -> _Answer | None:
        """Return the answer; None while the scheduler gives none."""
        try:
            answer = self.ask()
        except UserError as error:
            if not self._has_answered:
                raise
            self._silent_since_s = self._silent_since_s or time.monotonic()
            if time.monotonic() - self._silent_since_s < _SILENT_S:
                return None
            raise error.changed(hint=self._hint) from error
        self._has_answered, self._silent_since_s = True, 0.0
        return answer


def _no_log(path: Path, log_dir: Path) -> InputError:
    state = read_state(log_dir)
    if state is None or state.ended == "stopped":  # and may be requeued
        return LaunchError(
            str(path),
            "does not exist yet",
            "check with runner status whether the job has started",
            code="launch.no-log",
        )
    ranks = sorted(file.stem for file in path.parent.glob("rank-*.log"))
    return LaunchError(
        str(path),
        "does not exist, and the job has ended",
        f"it has logs {ranks[0]} to {ranks[-1]}" if ranks else "",
        code="launch.no-log",
    )


def _silent(log_dir: Path) -> list[str]:
    """Name the ranks without a recent heartbeat, although others have one."""
    beats = read_beats(log_dir)
    newest_s = max((beat.time for beat in beats), default=0.0)
    return [place_of(beat.rank, beat.stages, beat.host) for beat in beats if newest_s - beat.time > SKEWED_S]


def _progress(metrics: Path) -> dict[str, Any]:
    """Return the progress of the last attempt in these metrics, which may contain earlier attempts."""
    progress: dict[str, Any] = {"last_step": None, "last_loss": None, "last_checkpoint": None}
    saved: dict[str, Any] = {}
    text = metrics.read_text(errors="replace") if metrics.is_file() else ""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            record = dict(read_object(line, f"{metrics}:{number}"))
            check_fields(record, f"{metrics}:{number}")
        except InputError:  # the line that is being written
            continue
        if "load_s" in record:
            check_same_run(record.get("run"), metrics.parent, f"{metrics}:{number}")
            progress = dict.fromkeys(progress)
        if "loss" in record and record.get("step", 0) <= saved.get("step", 0):  # taken again
            saved = {}
        if "checkpoint" in record and "save_error" not in record:
            saved = record
        # A checkpoint is noted once it is saved, steps after its own.
        progress["last_step"] = max(record.get("step", 0), progress["last_step"] or 0) or None
        progress["last_loss"] = record.get("loss", progress["last_loss"])
        progress["last_checkpoint"] = saved.get("checkpoint") if progress["last_step"] is not None else None
    return progress


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
    click.echo(table(_HEAD, [*map(_cells, rows)], left_columns=frozenset(_HEAD)))


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
        str(run.get("layout") or "-"), run["folder"],
    )  # fmt: skip


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
