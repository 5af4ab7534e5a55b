"""Slurm's commands and kubectl, run with a time limit, and the parts of a pod that flags describe."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from manifests.command.interpreter import safe_environment
from manifests.errors import InputError, LaunchError, UsageError, UserError

_LIMIT_S = 60
_SETTINGS = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # the user's, or the site's
_SILENT = "launch.scheduler-silent"
# What Slurm, and Kubernetes or a proxy before it, report where the answer to a request was lost.
_LOST = re.compile(
    r"time(d )?-?out|deadline exceeded|zero bytes|(send|receive) failure"
    r"|\beof\b|connection (reset|broken)|broken pipe|http2: |stream error|bad gateway|leader changed",
    re.IGNORECASE,
)


def working_folder() -> str:
    """Return the folder where a job starts, for a line of its script."""
    folder = os.getcwd()
    if not folder.isprintable():
        problem = f"the working folder has a name that a batch script cannot contain: {folder!r}"
        raise UsageError("sbatch --chdir", problem, "rename it, or submit from another", code="launch.scheduler-value")
    return folder


def run_slurm(command: Sequence[str], standard_input: str = "", *, limit_s: float = _LIMIT_S) -> str:
    where = command[0]
    try:
        done = subprocess.run(
            command, input=standard_input, capture_output=True, text=True, timeout=limit_s,
            errors="surrogateescape",  # names of files need not be UTF-8
            env=_outside_jobs(safe_environment()),  # a job gets the environment of sbatch
        )  # fmt: skip
    except FileNotFoundError as error:
        hint = "run this on a login node, where Slurm's commands are installed"
        raise InputError(where, "not found on this machine", hint, code="system.missing-program") from error
    except OSError as error:
        raise InputError(where, f"cannot be started: {error.strerror}", code="system.missing-program") from error
    except subprocess.TimeoutExpired as error:
        hint = "check with scontrol ping whether slurmctld is up"
        raise LaunchError(where, f"did not answer within {limit_s:.0f} s", hint, code=_SILENT) from error
    if done.returncode:
        message = " ".join(done.stderr.split()).removeprefix(f"{where}: error: ")
        raise LaunchError(where, message or f"exited with code {done.returncode}", code="launch.scheduler-failed")
    return done.stdout


def _outside_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what Slurm has set for the job that this process is in, as an interactive one.

    srun takes it for flags: a job that is submitted there would get that job's GPUs, CPUs and memory for its ranks.
    """
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SLURMD_", "SRUN_")) or name in _SETTINGS
    }


def submit_to_slurm(flags: Sequence[str], script: str, name: str) -> tuple[str, str]:
    """Submit a batch script, whose job has this name; return the job's number, and its cluster if sbatch names one."""
    with submitting(f"squeue --me --name={shlex.quote(name)}", "scancel"):
        answer = run_slurm(["sbatch", "--parsable", *flags], script)
        if (number := re.search(r"^(\d+)(?:;(.*))?$", answer, re.MULTILINE | re.ASCII)) is None:
            raise LaunchError("sbatch", f"expected the number of a job, printed {answer[:80]!r}", code=_SILENT)
    return number[1], number[2] or ""


def job_words(number: str, cluster: str) -> list[str]:
    """Return the arguments that name a job to scontrol and scancel, which ask the default cluster otherwise."""
    return [*([f"--clusters={cluster}"] if cluster else []), number]


@contextlib.contextmanager
def submitting(find: str, cancel: str) -> Iterator[None]:
    """Name the commands that find and cancel a job where no answer says whether it was submitted."""
    try:
        yield
    except LaunchError as error:
        if not may_be_submitted(error):
            raise
        hint = f"look for it with {find}, and end it with {cancel} before you submit it again"
        raise error.changed(problem=f"{error.problem}; the job may be submitted all the same", hint=hint) from error


def may_be_submitted(error: UserError) -> bool:
    """Whether a job may be submitted although submitting it failed with this error."""
    return error.code == _SILENT or _LOST.search(error.problem) is not None


MOUNT = re.compile(r"(/[^:]*|[a-z0-9]([-a-z0-9.]*[a-z0-9])?):(?P<target>/[^:/][^:]*)")  # a claim's name is a DNS name
MOUNT_FORM = "CLAIM:/FOLDER or /FOLDER-OF-THE-NODE:/FOLDER"
ABSENT = ("not found on this machine", "run this where kubectl reaches the cluster; --dry-run does not need it")
_LOGGED = re.compile(r"[EWI]\d{4} ")  # a line of kubectl's log, as klog writes it


def run_kubectl(command: Sequence[str], standard_input: str = "") -> str:
    try:
        done = subprocess.run(command, input=standard_input, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError as error:
        raise InputError(command[0], *ABSENT, code="system.missing-program") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(command[0], f"did not answer within {_LIMIT_S} s", code=_SILENT) from error
    if done.returncode:
        message = said_by_kubectl(done.stderr.splitlines())
        raise LaunchError(
            " ".join(command[:2]), message or f"exited with code {done.returncode}", code="launch.scheduler-failed"
        )
    return done.stdout


def said_by_kubectl(lines: Iterable[str]) -> str:
    """Return what kubectl says, without its log."""
    return " ".join(" ".join(line for line in lines if not _LOGGED.match(line)).split())


def literal(text: str) -> str:
    """Escape a text for Kubernetes, which expands $(NAME) and reads $$ as $."""
    return text.replace("$", "$$")


def volumes_of(mounts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the volumes of mounts, which have the form `MOUNT`, by their mount paths."""
    volumes: dict[str, dict[str, Any]] = {}
    for number, mount in enumerate(mounts):
        source, _, target = mount.rpartition(":")
        kind, key = ("hostPath", "path") if source.startswith("/") else ("persistentVolumeClaim", "claimName")
        volumes[target.rstrip("/")] = {"name": f"mount-{number}", kind: {key: source}}
    return volumes
