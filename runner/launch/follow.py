"""Status, output and cancellation of a launched job, by its log folder. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from manifests.errors import (
    InputError,
    LaunchError,
    UsageError,
    UserError,
)
from runner.launch.schedulers import jobset, slurm
from runner.launch.schedulers import local_processes as processes
from runner.report.lines import check_types, read_object
from runner.rundir.heartbeat import SKEWED_S, log_path, read_beats
from runner.rundir.job_record import JobRecord, read_record
from runner.rundir.rank_label import place_of
from runner.rundir.run_record import config_of, read_record_of
from runner.rundir.state import RunState, read_state

_POLL_S = 1.0
_SILENT_S = 60.0  # a scheduler that is being restarted does not answer
_CODES = {"COMPLETED": 0, "STOPPED": 130, "KILLED": 5}


def status(log_dir: Path) -> dict[str, Any]:
    """Return the status of a job: its state in the scheduler, its progress, and why it failed.

    Raises:
        UserError: no job was launched with this log folder, or its scheduler does not answer.
    """
    record, ended = read_record(log_dir), read_state(log_dir)
    found: dict[str, Any] = {
        "version": 1, "scheduler": record.scheduler, "id": record.id, "name": record.name,
        "state": "", "reason": "", "nodes": "", "requeues": 0,
    }  # fmt: skip
    if record.scheduler == "slurm":
        state = slurm.find_state(record)
        word = ended.word if ended and state.is_forgotten else state.word
        found |= {"state": word, "reason": state.reason, "nodes": state.nodes, "requeues": state.num_requeues}
    elif record.scheduler == "local":
        found |= {"state": processes.find_state(record, log_dir), "nodes": record.host}
    else:
        known = jobset.find_state(record)
        found["state"] = ended.word if ended and known.is_forgotten else str(known)
    has_failed = ended is not None and ended.ended == "failed"
    found["error"] = ended.error if ended and has_failed else None
    found["error_code"] = ended.error_code if ended and has_failed else None
    found["silent_ranks"] = _silent(log_dir) if found["state"].upper() == "RUNNING" else []
    num_steps = config_of(read_record_of(log_dir)).get("steps")
    return found | _progress(log_dir / "metrics.jsonl") | {"num_steps": num_steps}


def show_logs(log_dir: Path, say: Callable[[str], object], *, rank: int | None, is_followed: bool) -> None:
    """Print the output of a job, or the log of one rank.

    Raises:
        UserError: no such job, or no such rank yet.
    """
    record = read_record(log_dir)
    if record.scheduler == "jobset" and rank is None and not is_followed:
        if problem := jobset.print_logs(record, say, follow=False):
            raise LaunchError("kubectl logs", problem, code="launch.scheduler-failed")
        return
    path = Path(record.output) if rank is None else log_path(log_dir, rank)
    if not is_followed:
        if not path.is_file():
            raise _no_log(path, log_dir)
        say(path.read_text(errors="replace"))
    else:
        follow(record, path, say, log_dir)
    ended = read_state(log_dir)
    if record.scheduler == "local" and ended is not None and ended.error:
        said = f"error: {ended.error}\n"  # it was printed on the terminal, and not to every log
        if not path.is_file() or said not in path.read_text(errors="replace"):
            say(said)


def _no_log(path: Path, log_dir: Path) -> InputError:
    state = read_state(log_dir)
    if state is None or state.ended == "stopped":  # and may be requeued
        return LaunchError(
            str(path),
            "does not exist yet",
            "check with runner status whether the job has started",
            code="launch.no-log",
        )
    left = sorted(found.stem for found in path.parent.glob("rank-*.log"))
    return LaunchError(
        str(path),
        "does not exist, and the job has ended",
        f"it has logs {left[0]} to {left[-1]}" if left else "",
        code="launch.no-log",
    )


def follow(record: JobRecord, path: Path, say: Callable[[str], object], log_dir: Path) -> int:
    """Print the output of a job until it ends, and return its exit code."""
    if record.scheduler == "jobset" and path == Path(record.output):
        return _follow_pods(record, say, log_dir)
    position, code, asked = 0, None, _Asked(record, log_dir)
    while True:
        is_over = code is not None
        if path.is_file():
            with open(path, errors="replace") as stream:
                stream.seek(position)
                if text := stream.read():
                    say(text)
                position = stream.tell()
        if is_over:
            assert code is not None
            return code
        code = asked.exit_code()
        if code is None:
            time.sleep(_POLL_S)


def _follow_pods(record: JobRecord, say: Callable[[str], object], log_dir: Path) -> int:
    """Print the output of the pods of a job until it ends, including pods that start later."""
    asked, since, shown = _Asked(record, log_dir), "", ""

    def hear(line: str) -> None:
        nonlocal since
        since = datetime.now(UTC).isoformat()  # after a broken connection, the next one starts here
        say(line)

    while True:
        code, problem = asked.exit_code(), ""
        try:
            phases = jobset.find_phases(record)
        except UserError as error:
            phases, problem = [], f"{error.where}: {error.problem}"
        if num_pending := phases.count("Pending"):  # kubectl would leave them out
            problem = f"{num_pending} of {len(phases)} pods are pending"
        if code is not None or ("Running" in phases and not num_pending):
            problem = jobset.print_logs(record, hear, follow=code is None, since=since)
        if problem and problem != shown:
            say(problem + "\n")
        shown = problem
        if code is not None:
            return code
        time.sleep(_POLL_S)


class _Asked:
    """A job whose scheduler is polled, and may fail to answer for a while."""

    def __init__(self, record: JobRecord, log_dir: Path) -> None:
        self._record, self._log_dir = record, log_dir
        self._has_answered, self._silent_since_s = False, 0.0

    def exit_code(self) -> int | None:
        """Return the job's exit code; None while it waits, runs, or its scheduler does not answer.

        Raises:
            UserError: the scheduler has never answered, or not for a minute.
        """
        try:
            code = _exit_code(self._record, self._log_dir)
        except UserError as error:
            if not self._has_answered:
                raise
            self._silent_since_s = self._silent_since_s or time.monotonic()
            if time.monotonic() - self._silent_since_s < _SILENT_S:
                return None
            hint = f"the job is not affected; follow it again with runner logs {self._log_dir} -f"
            raise error.changed(hint=hint) from error
        self._has_answered, self._silent_since_s = True, 0.0
        return code


def cancel(log_dir: Path, *, is_forced: bool = False) -> tuple[JobRecord, bool]:
    """Cancel the job that was launched with this log folder; return its record, and whether it was still running.

    A job of a scheduler counts as running for as long as the scheduler knows it.

    Raises:
        UserError: no such job, or its scheduler refuses.
    """
    record = read_record(log_dir)
    if record.scheduler == "local":
        return record, processes.cancel(record, is_forced=is_forced)
    if is_forced:
        raise UsageError(
            "--force",
            "is supported for jobs of this machine alone",
            "a scheduler kills ranks that do not end in time",
            code="launch.scheduler-flag",
        )
    if record.scheduler == "slurm":
        return record, slurm.cancel(record)
    jobset.cancel(record)
    return record, True


def _exit_code(record: JobRecord, log_dir: Path) -> int | None:
    """Return a job's exit code; None while it waits or runs."""
    ended = read_state(log_dir)
    if record.scheduler == "local":
        word = processes.find_state(record, log_dir)
        ended = read_state(log_dir)
        return None if word == "RUNNING" else _CODES.get(word, ended.code if ended else 5)
    if record.scheduler == "slurm":
        state = slurm.find_state(record)
        if not state.is_over:
            return None
        if state.is_forgotten:
            return _code_left(ended)
        was_stopped = ended is not None and ended.ended == "stopped"
        return state.exit_code or (0 if state.word == "COMPLETED" else 130 if was_stopped else 5)
    found = jobset.find_state(record)
    if not found.is_over:
        return None
    if found.is_forgotten:
        return _code_left(ended)
    return 0 if found == "Completed" else 5


def _code_left(ended: RunState | None) -> int:
    """Return the exit code of a job that the scheduler has forgotten."""
    return 5 if ended is None else _CODES.get(ended.word, ended.code)


def _silent(log_dir: Path) -> list[str]:
    """Name the ranks without a recent heartbeat, although others have one."""
    beats = read_beats(log_dir)
    newest_s = max((beat.time for beat in beats), default=0.0)
    return [place_of(beat.rank, beat.stages, beat.host) for beat in beats if newest_s - beat.time > SKEWED_S]


def _progress(metrics: Path) -> dict[str, Any]:
    """Return the progress of the last attempt in these metrics, which may contain earlier attempts."""
    found: dict[str, Any] = {"last_step": None, "last_loss": None, "last_checkpoint": None}
    saved: dict[str, Any] = {}
    text = metrics.read_text(errors="replace") if metrics.is_file() else ""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            said = dict(read_object(line, f"{metrics}:{number}"))
            check_types(said, f"{metrics}:{number}")
        except InputError:  # the line that is being written
            continue
        if "load_s" in said:
            found = dict.fromkeys(found)
        if "loss" in said and said.get("step", 0) <= saved.get("step", 0):  # taken again, so after an older checkpoint
            saved = {}
        if "checkpoint" in said and "save_error" not in said:
            saved = said
        found["last_step"] = said.get("step", found["last_step"])
        found["last_loss"] = said.get("loss", found["last_loss"])
        found["last_checkpoint"] = saved.get("checkpoint") if found["last_step"] is not None else None
    return found
