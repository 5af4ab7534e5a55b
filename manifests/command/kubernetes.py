"""What jobs on Kubernetes share: kubectl, run with a time limit, and the parts of a pod that flags describe."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from manifests.errors import InputError, LaunchError

MOUNT = re.compile(r"(/[^:]*|[a-z0-9]([-a-z0-9.]*[a-z0-9])?):(?P<target>/[^:/][^:]*)")  # a claim's name is a DNS name
MOUNT_FORM = "CLAIM:/FOLDER or /FOLDER-OF-THE-NODE:/FOLDER"
ABSENT = ("not found on this machine", "run this where kubectl reaches the cluster; --dry-run does not need it")
_LIMIT_S = 60
_LOGGED = re.compile(r"[EWI]\d{4} ")  # a line of kubectl's log, as klog writes it


def run_kubectl(command: Sequence[str], standard_input: str = "") -> str:
    """Return the output of kubectl.

    Raises:
        InputError: it is not installed.
        LaunchError: it does not answer in time, or fails.
    """
    try:
        done = subprocess.run(command, input=standard_input, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError as error:
        raise InputError(command[0], *ABSENT, code="system.missing-program") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(command[0], f"did not answer within {_LIMIT_S} s", code="launch.scheduler-silent") from error
    if done.returncode:
        said = said_by_kubectl(done.stderr.splitlines())
        raise LaunchError(
            " ".join(command[:2]), said or f"exited with code {done.returncode}", code="launch.scheduler-failed"
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
    found: dict[str, dict[str, Any]] = {}
    for number, mount in enumerate(mounts):
        source, _, target = mount.rpartition(":")
        kind, key = ("hostPath", "path") if source.startswith("/") else ("persistentVolumeClaim", "claimName")
        found[target.rstrip("/")] = {"name": f"mount-{number}", kind: {key: source}}
    return found
