"""A launched job looked at, followed and ended, by the log folder that it was launched with. No torch."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manifests.errors import InputError, UsageError
from runner.launch import jobset, processes, slurm
from runner.launch.record import JobRecord, read_record
from runner.launch.state import read_state
from runner.life.heartbeat import log_path, read_beats
from runner.life.place import place_of

__all__ = ["cancel", "follow", "show_logs", "status"]

_POLL_S = 1.0
_SILENT_S = 30.0  # clocks of nodes may differ
_LOCAL_CODES = {"COMPLETED": 0, "STOPPED": 130, "KILLED": 5}


def status(log_dir: Path) -> dict[str, Any]:
    """Give what is known of a job: the scheduler's word for it, how far its run has come, and why it failed.

    Raises:
        UserError: no job was launched with this log folder, or its scheduler cannot be asked.
    """
    record, ended = read_record(log_dir), read_state(log_dir)
    found: dict[str, Any] = {"version": 1, "scheduler": record.scheduler, "id": record.id, "name": record.name}
    if record.scheduler == "slurm":
        state = slurm.find_state(record)
        word = ended.word if ended and state.is_forgotten else state.word
        found |= {"state": word, "reason": state.reason, "nodes": state.nodes, "requeues": state.num_requeues}
    elif record.scheduler == "local":
        found |= {"state": processes.find_state(record, log_dir), "nodes": record.host}
    else:
        found["state"] = str(jobset.find_state(record))
    found["error"] = ended.error if ended and ended.ended == "failed" else None
    found["silent_ranks"] = _silent(log_dir) if found["state"].upper() == "RUNNING" else []
    return found | _progress(log_dir / "metrics.jsonl")


def show_logs(log_dir: Path, say: Callable[[str], object], *, rank: int | None, is_followed: bool) -> None:
    """Say what a job has printed, or what one rank of it has logged.

    Raises:
        UserError: no such job, or no such rank yet.
    """
    record = read_record(log_dir)
    if record.scheduler == "jobset" and rank is None:
        subprocess.run(jobset.log_command(record, follow=is_followed), check=False)
        return
    path = Path(record.output) if rank is None else log_path(log_dir, rank)
    if not is_followed:
        if not path.is_file():
            raise InputError(str(path), "is not there yet", "runner status says whether the job has begun")
        say(path.read_text(errors="replace"))
    else:
        follow(record, path, say, log_dir)
    ended = read_state(log_dir)
    if record.scheduler == "local" and ended is not None and ended.error:
        say(f"error: {ended.error}\n")  # the terminal that it was launched from has it, and no log


def follow(record: JobRecord, path: Path, say: Callable[[str], object], log_dir: Path) -> int:
    """Say what a job prints until it ends, and give its exit code."""
    position, code = 0, None
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
        code = _exit_code(record, log_dir)
        if code is None:
            time.sleep(_POLL_S)


def cancel(log_dir: Path, *, is_forced: bool = False) -> JobRecord:
    """End the job that was launched with this log folder, and give its record.

    Raises:
        UserError: no such job, or its scheduler refuses.
    """
    record = read_record(log_dir)
    if record.scheduler == "local":
        processes.cancel(record, is_forced=is_forced)
    elif is_forced:
        raise UsageError(
            "--force", "is for jobs of this machine", "a scheduler kills what does not end in its own time"
        )
    else:
        (slurm.cancel if record.scheduler == "slurm" else jobset.cancel)(record)
    return record


def _exit_code(record: JobRecord, log_dir: Path) -> int | None:
    """Give a job's exit code; None while it waits or runs."""
    ended = read_state(log_dir)
    if record.scheduler == "local":
        word = processes.find_state(record, log_dir)
        ended = read_state(log_dir)
        return None if word == "RUNNING" else _LOCAL_CODES.get(word, ended.code if ended else 5)
    if record.scheduler == "slurm":
        state = slurm.find_state(record)
        if not state.is_over:
            return None
        if state.is_forgotten:
            return ended.code if ended else 5
        return state.exit_code or (0 if state.word == "COMPLETED" else 5)
    found = jobset.find_state(record)
    return None if not found.is_over else (0 if found == "Completed" else 5)


def _silent(log_dir: Path) -> list[str]:
    """Name the ranks that gave no sign of life for long, although others did."""
    beats = read_beats(log_dir)
    newest_s = max((beat.time for beat in beats), default=0.0)
    return [place_of(beat.rank, beat.stages, beat.host) for beat in beats if newest_s - beat.time > _SILENT_S]


def _progress(metrics: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"last_step": None, "last_loss": None, "last_checkpoint": None}
    for line in metrics.read_text().splitlines() if metrics.is_file() else ():
        try:
            said = json.loads(line)
        except ValueError:  # the line that is being written
            continue
        found["last_step"] = said.get("step", found["last_step"])
        found["last_loss"] = said.get("loss", found["last_loss"])
        if "save_error" not in said:
            found["last_checkpoint"] = said.get("checkpoint", found["last_checkpoint"])
    return found
