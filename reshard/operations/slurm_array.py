"""A pack in parts, handed to Slurm: an array of parts, and a commit that waits for all of them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import OutputError, UserError
from manifests.owned import files_of_manifest
from manifests.publish import check_target
from manifests.slurm import run_slurm

__all__ = ["PackJob", "check_out", "render_commit", "render_parts", "show", "show_json", "submit"]

_ARRAY_ID = "ARRAY_JOB_ID"  # stands in for the number that Slurm has not given yet


@dataclass(frozen=True, kw_only=True, slots=True)
class PackJob:
    """What sbatch is asked. `pack` and `commit` are arguments of reshard; `options` go to both jobs."""

    num_parts: int
    pack: tuple[str, ...]
    commit: tuple[str, ...]
    options: tuple[str, ...] = ()


def render_parts(job: PackJob) -> str:
    """Give the batch script of the parts; one that is killed goes on, here or where it is queued."""
    part = f'--part "$SLURM_ARRAY_TASK_ID/{job.num_parts}"'
    options = (f"--array=1-{job.num_parts}", "--requeue")
    # Not left to a requeue by hand: once a part has failed, Slurm never starts what depends on it.
    again = f"for attempt in 1 2 3; do\n  {_reshard(job.pack)} {part}\n  code=$?; [ $code -gt 128 ] || break\ndone"
    return _script("reshard-pack", options, f"{again}\nexit $code", job)


def render_commit(job: PackJob) -> str:
    """Give the batch script of the commit."""
    return _script("reshard-commit", ("--requeue",), f"exec {_reshard(job.commit)}", job)


def show(job: PackJob) -> str:
    """Give exactly what would be submitted, after the commands that it is handed to."""
    return "\n".join(f"$ {shlex.join(command)}\n{script}" for command, script in _both(job))


def show_json(job: PackJob) -> dict[str, Any]:
    """Give the same as the object that `--json` prints."""
    parts, commit = ({"command": command, "script": script} for command, script in _both(job))
    return {"version": 1, "num_parts": job.num_parts, "parts": parts, "commit": commit}


def check_out(out: Path, *, force: bool) -> None:
    """Refuse an output that the jobs could not write, before they wait in a queue.

    Raises:
        InputError: it exists and `force` is not given, or nothing can be written there.
    """
    check_target(out, force, files_of_manifest)
    there = next(parent for parent in out.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        problem = f"{there} is no folder" if not there.is_dir() else f"{there} is not yours to write"
        hint = "choose another --out"
        raise OutputError(str(out), f"cannot be written here: {problem}", hint, code="output.unwritable")


def submit(job: PackJob) -> tuple[str, str]:
    """Hand both jobs to Slurm; give the numbers of the array and of the commit.

    Raises:
        UserError: there is no Slurm here, or it refuses a job; parts without a commit are cancelled.
    """
    parts = run_slurm(_sbatch(job), render_parts(job)).strip().partition(";")[0]
    try:
        return parts, run_slurm(_sbatch(job, parts), render_commit(job)).strip().partition(";")[0]
    except UserError:
        run_slurm(["scancel", parts])
        raise


def _both(job: PackJob) -> Iterator[tuple[list[str], str]]:
    """Give the command and the script of the array, then those of the commit."""
    yield _sbatch(job), render_parts(job)
    yield _sbatch(job, _ARRAY_ID), render_commit(job)


def _sbatch(job: PackJob, after: str | None = None) -> list[str]:
    # Options here as well as in the script, over which SBATCH_ACCOUNT and its like in the environment win.
    told = [word for option in job.options for word in shlex.split(option)]
    return ["sbatch", "--parsable", *told, *([f"--dependency=afterok:{after}"] if after else [])]


def _script(name: str, options: Sequence[str], command: str, job: PackJob) -> str:
    told = [f"--job-name={name}", *options, "--open-mode=append", f"--chdir={shlex.quote(str(Path.cwd()))}"]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*told, *job.options)), "", command, ""]
    return "\n".join(lines)


def _reshard(arguments: Sequence[str]) -> str:
    return shlex.join([sys.executable, "-m", "reshard", *arguments])
