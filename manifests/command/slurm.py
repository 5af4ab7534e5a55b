"""Slurm's commands (sbatch, scontrol, scancel), run with a time limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from manifests.command.interpreter import safe_environment
from manifests.errors import InputError, LaunchError, UsageError

_LIMIT_S = 60


def working_folder() -> str:
    """Return the folder where a job starts, for a line of its script.

    Raises:
        UsageError: its name would end that line, or is not text.
    """
    folder = os.getcwd()
    if not folder.isprintable():
        problem = f"the working folder has a name that a batch script cannot contain: {folder!r}"
        raise UsageError("sbatch --chdir", problem, "rename it, or submit from another", code="launch.scheduler-value")
    return folder


def run_slurm(command: Sequence[str], standard_input: str = "", *, limit_s: float = _LIMIT_S) -> str:
    """Return the output of one of Slurm's commands.

    Raises:
        InputError: the command is not installed or cannot be started.
        LaunchError: it does not answer in `limit_s`, or it fails.
    """
    where = command[0]
    try:
        done = subprocess.run(
            command, input=standard_input, capture_output=True, text=True, timeout=limit_s, env=safe_environment()
        )  # a job gets the environment of sbatch
    except FileNotFoundError as error:
        hint = "run this on a login node, where Slurm's commands are installed"
        raise InputError(where, "not found on this machine", hint, code="system.missing-program") from error
    except OSError as error:
        raise InputError(where, f"cannot be started: {error.strerror}", code="system.missing-program") from error
    except subprocess.TimeoutExpired as error:
        hint = "check with scontrol ping whether slurmctld is up"
        raise LaunchError(
            where, f"did not answer within {limit_s:.0f} s", hint, code="launch.scheduler-silent"
        ) from error
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix(f"{where}: error: ")
        raise LaunchError(where, said or f"exited with code {done.returncode}", code="launch.scheduler-failed")
    return done.stdout
