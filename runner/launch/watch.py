"""A submitted job looked at, followed and ended, by the log folder that it was launched with. No torch."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manifests.errors import InputError
from runner.launch import jobset, slurm
from runner.launch.record import JobRecord, read_record

__all__ = ["cancel", "follow", "show_logs", "status"]

_POLL_S = 1.0


def status(log_dir: Path) -> dict[str, Any]:
    """Give what is known of a job: the scheduler's word for it, and how far its run has come.

    Raises:
        UserError: no job was launched with this log folder, or its scheduler cannot be asked.
    """
    record = read_record(log_dir)
    found: dict[str, Any] = {"version": 1, "scheduler": record.scheduler, "id": record.id, "name": record.name}
    if record.scheduler == "slurm":
        state = slurm.find_state(record)
        found |= {"state": state.word, "reason": state.reason, "nodes": state.nodes, "requeues": state.num_requeues}
    else:
        found["state"] = str(jobset.find_state(record))
    step, checkpoint = _progress(log_dir / "metrics.jsonl")
    return found | {"last_step": step, "last_checkpoint": checkpoint}


def show_logs(log_dir: Path, say: Callable[[str], object], *, rank: int | None, is_followed: bool) -> None:
    """Say what a job has printed, or what one rank of it has logged.

    Raises:
        UserError: no such job, or no such rank yet.
    """
    record = read_record(log_dir)
    if record.scheduler == "jobset" and rank is None:
        subprocess.run(jobset.log_command(record, follow=is_followed), check=False)
        return
    path = Path(record.output) if rank is None else log_dir / f"rank-{rank:05d}.log"
    if not is_followed:
        if not path.is_file():
            raise InputError(str(path), "is not there yet", "runner status says whether the job has begun")
        say(path.read_text(errors="replace"))
        return
    follow(record, path, say)


def follow(record: JobRecord, path: Path, say: Callable[[str], object]) -> int:
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
        code = _exit_code(record)
        if code is None:
            time.sleep(_POLL_S)


def cancel(log_dir: Path) -> JobRecord:
    """End the job that was launched with this log folder, and give its record.

    Raises:
        UserError: no such job, or its scheduler refuses.
    """
    record = read_record(log_dir)
    (slurm.cancel if record.scheduler == "slurm" else jobset.cancel)(record)
    return record


def _exit_code(record: JobRecord) -> int | None:
    """Give a job's exit code; None while it waits or runs."""
    if record.scheduler == "slurm":
        state = slurm.find_state(record)
        if not state.is_over:
            return None
        return state.exit_code or (0 if state.word == "COMPLETED" else 5)
    word = jobset.find_state(record)
    return None if not word.is_over else (0 if word == "Completed" else 5)


def _progress(metrics: Path) -> tuple[int | None, str | None]:
    step, checkpoint = None, None
    for line in metrics.read_text().splitlines() if metrics.is_file() else ():
        try:
            found = json.loads(line)
        except ValueError:  # the line that is being written
            continue
        step = found.get("step", step)
        if "save_error" not in found:
            checkpoint = found.get("checkpoint", checkpoint)
    return step, checkpoint
