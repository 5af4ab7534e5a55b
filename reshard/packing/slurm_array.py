"""A pack in parts on Slurm: a job array of the parts, and a commit that depends on all of them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.command.interpreter import module_command
from manifests.command.schedulers import run_slurm, working_folder
from manifests.errors import OutputError, Parameter, UsageError, UserError
from stores.folders.owned import files_of_manifest
from stores.folders.publish import check_target

_ARRAY_ID = "ARRAY_JOB_ID"  # placeholder for the job id that Slurm has not assigned yet
_RESERVED = ("--array", "-a", "--wrap", "--requeue", "--no-requeue", "--open-mode", "--dependency", "-d")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackJob:
    """The jobs to submit. `pack` and `commit` are arguments of reshard; sbatch gets `options` for both."""

    num_parts: int
    pack: tuple[str, ...]
    commit: tuple[str, ...]
    options: tuple[str, ...] = ()


def check_options(options: Sequence[str]) -> None:
    """Refuse what sbatch would not take for one option, or what would break the job array.

    Raises:
        UsageError: naming the option.
    """

    def refused(problem: str, hint: str = "") -> UsageError:
        return UsageError("--sbatch-arg", problem, hint, code="options.sbatch-argument")

    for option in options:
        shown = repr(option[:80])
        if not option.isprintable() or not option.startswith("-") or option.endswith("="):
            raise refused(f"expected an option of sbatch, found {shown}")
        try:
            words = shlex.split(option)
        except ValueError as error:
            raise refused(f"{shown}: {error}", "close its quotes") from error
        # sbatch takes a word that is neither a flag nor a flag's value for its script.
        if len(words) > 2 or (len(words) == 2 and ("=" in words[0] or words[1][:1] in ("-", "#"))):
            raise refused(f"expected one option, found {shown}", "quote a value with spaces")
        if words[0].partition("=")[0] in _RESERVED:
            raise refused(f"{option!r} is not supported: reshard sets it for the job array", "leave it out")


def render_parts(job: PackJob) -> str:
    """Return the batch script of the parts; a part that is killed is resumed, here or after a requeue."""
    part = f'--part "$SLURM_ARRAY_TASK_ID/{job.num_parts}"'
    options = (f"--array=1-{job.num_parts}", "--requeue")
    # Retried in the script: once a part has failed, Slurm never starts what depends on it.
    again = f"for attempt in 1 2 3; do\n  {_reshard(job.pack)} {part}\n  code=$?; [ $code -gt 128 ] || break\ndone"
    return _script("reshard-pack", options, f"{again}\nexit $code", job)


def render_commit(job: PackJob) -> str:
    """Return the batch script of the commit."""
    return _script("reshard-commit", ("--requeue",), f"exec {_reshard(job.commit)}", job)


def show(job: PackJob) -> str:
    """Return each sbatch command, followed by the script that it would submit."""
    return "\n".join(f"$ {shlex.join(command)}\n{script}" for command, script in _both(job))


def show_json(job: PackJob) -> dict[str, Any]:
    """Return the same as the object that `--json` prints."""
    parts, commit = ({"command": command, "script": script} for command, script in _both(job))
    return {"version": 1, "num_parts": job.num_parts, "parts": parts, "commit": commit}


def check_out(out: Path, *, force: bool) -> None:
    """Refuse an output that the jobs could not write, before they are queued.

    Raises:
        OutputError: it exists and `force` is not given, or it cannot be written from here.
    """
    check_target(out, force, files_of_manifest)
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        why = "is not a folder" if not parent.is_dir() else "is not writable"
        problem = f"cannot be written: {parent} {why}"
        raise OutputError(str(out), problem, f"choose another {Parameter('out')}", code="output.unwritable")


def submit(job: PackJob) -> tuple[str, str]:
    """Submit both jobs to Slurm; return the job ids of the array and of the commit.

    Raises:
        LaunchError: Slurm refuses a job; if it is the commit, the parts are cancelled.
        InputError: sbatch is not installed here.
    """
    parts = run_slurm(_sbatch(job), render_parts(job)).strip().partition(";")[0]
    try:
        return parts, run_slurm(_sbatch(job, parts), render_commit(job)).strip().partition(";")[0]
    except UserError:
        run_slurm(["scancel", parts])
        raise


def _both(job: PackJob) -> Iterator[tuple[list[str], str]]:
    """Yield the command and the script of the array, then those of the commit."""
    yield _sbatch(job), render_parts(job)
    yield _sbatch(job, _ARRAY_ID), render_commit(job)


def _sbatch(job: PackJob, after: str | None = None) -> list[str]:
    # Options are here as well as in the script, which SBATCH_ACCOUNT and the like in the environment override.
    words = [word for option in job.options for word in shlex.split(option)]
    return ["sbatch", "--parsable", *words, *([f"--dependency=afterok:{after}"] if after else [])]


def _script(name: str, options: Sequence[str], command: str, job: PackJob) -> str:
    ours = [f"--job-name={name}", *options, "--open-mode=append", f"--chdir={shlex.quote(working_folder())}"]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*ours, *job.options)), "", command, ""]
    return "\n".join(lines)


def _reshard(arguments: Sequence[str]) -> str:
    return shlex.join(module_command("reshard", *arguments))
