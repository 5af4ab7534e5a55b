"""Check the values of a job before its scheduler sees them and misreads them. No torch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from manifests.errors import UsageError
from manifests.invariants import MANIFEST_NAME
from stores.address import is_url

_SIGNAL = re.compile(r"USR2@(\d{1,5})")
_MAX_SIGNAL_S = 65535  # sbatch(1), --signal
_TIME = re.compile(r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?|(?P<n>\d+(?::\d+){0,2}))")
_FOREVER = ("unlimited", "infinite")

# Flags that --sbatch-arg may not set, because the job depends on them, and the flag to use instead.
_OWN = {
    "nodes": "--nnodes", "ntasks": "--nproc-per-node", "ntasks-per-node": "--nproc-per-node", "job-name": "--name",
    "output": "--log-dir", "open-mode": "--log-dir", "signal": "--signal", "requeue": "--requeue",
    "no-requeue": "--requeue", "time": "--time", "partition": "--partition", "account": "--account", "qos": "--qos",
    "chdir": "", "array": "", "wrap": "",
}  # fmt: skip
_SHORT = {
    "N": "nodes", "n": "ntasks", "J": "job-name", "o": "output", "t": "time", "p": "partition", "A": "account",
    "q": "qos", "D": "chdir", "a": "array",
}  # fmt: skip


def parse_signal(text: str) -> int:
    """Read the seconds of USR2@SECONDS.

    Raises:
        UsageError: another signal, or not such a number.
    """
    match = _SIGNAL.fullmatch(text)
    if match and 0 < int(match[1]) <= _MAX_SIGNAL_S:
        return int(match[1])
    hint = f"seconds before the end, 1 to {_MAX_SIGNAL_S}, such as USR2@120"
    if not text.startswith("USR2"):
        hint = "use SIGUSR2, at which the runner saves and stops; SIGUSR1 kills torchrun and leaves its ranks running"
    raise UsageError("--signal", f"expected USR2@SECONDS, found {text!r}", hint, code="launch.scheduler-value")


def parse_time(text: str) -> int | None:
    """Read a time limit as sbatch does, in seconds; None: there is no limit.

    Raises:
        UsageError: sbatch would reject it.
    Source: sbatch(1), --time.
    """
    if text.lower() in _FOREVER:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(
            "--time",
            f"expected minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, found {text!r}",
            "such as 30, 4:00:00 or 1-12",
            code="launch.scheduler-value",
        )
    if match["n"] is None:
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("d", "dh", "dm", "ds"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None
    parts = [int(part) for part in match["n"].split(":")]
    hours, minutes, seconds = (0, *parts) if len(parts) == 2 else (0, *parts, 0) if len(parts) == 1 else parts
    return (hours * 60 + minutes) * 60 + seconds or None


def check_texts(given: Iterable[tuple[str, str | None]], *, without_spaces: bool = False) -> None:
    """Check that the value of each flag, if there is one, is one line of text.

    Raises:
        UsageError: naming the flag.
    """
    for flag, value in given:
        if value is None:
            continue
        if not value.strip() or not value.isprintable() or (without_spaces and " " in value):
            what = "one word" if without_spaces else "one line of text"
            raise UsageError(flag, f"expected {what}, found {value!r}", code="launch.scheduler-value")


def check_mounts(mounts: Sequence[str], form: re.Pattern[str], expected: str) -> None:
    """Check the form of every mount, and that no two have the same target.

    Raises:
        UsageError: naming the mount.
    """
    seen: dict[str, str] = {}
    for mount in mounts:
        match = form.fullmatch(mount)
        if match is None or ".." in mount.split("/"):
            raise UsageError("--mount", f"expected {expected}, found {mount!r}", code="launch.mount")
        target = match["target"].rstrip("/") or "/"
        if target in seen:
            raise UsageError(
                "--mount", f"{seen[target]!r} and {mount!r} have the same target {target}", code="launch.mount"
            )
        seen[target] = mount


def is_shown(path: Path, mounts: Sequence[str]) -> bool:
    """Whether a container sees this absolute path through a mount."""
    return any(path.is_relative_to(mount.rpartition(":")[2]) for mount in mounts)


def shown_address(address: str, written: str, mounts: Sequence[str]) -> str:
    """Return a manifest's address as a container sees it: as written, if a mount has it only under that path."""
    path = Path(os.path.normpath(Path.cwd() / written))
    is_named = not is_url(address) and not is_shown(Path(address), mounts) and is_shown(path, mounts)
    return str(path / MANIFEST_NAME if path.is_dir() else path) if is_named else address


def check_read(paths: Iterable[tuple[str, str]], mounts: Sequence[str]) -> None:
    """Check that relative paths that pods read, each after its flag, are on a mount; others are in the image.

    Raises:
        UsageError: naming the flag and the path.
    """
    here = Path.cwd()
    for flag, given in paths:
        if not Path(given).is_absolute() and not is_shown(Path(os.path.normpath(here / given)), mounts):
            raise UsageError(
                f"{flag} {given}", f"is relative to {here}, and no --mount provides it there in the pods",
                "use an absolute path: below a --mount, or in the image", code="launch.not-mounted")  # fmt: skip


def check_written(paths: Iterable[tuple[str, str]], mounts: Sequence[str]) -> None:
    """Check that every path that pods write, each after its flag, is on a mount; relative ones start at this folder.

    Raises:
        UsageError: naming the flag and the path.
    """
    here = Path.cwd()
    for flag, given in paths:
        if not Path(given).is_absolute() and not is_shown(here, mounts):
            raise UsageError(
                f"{flag} {given}", f"is relative to {here}, and no --mount provides that folder in the pods",
                "use an absolute path below a --mount", code="launch.not-mounted")  # fmt: skip
        path = Path(os.path.normpath(here / given))
        if not is_shown(path, mounts):
            folder = path if path.parent == Path("/") else path.parent
            raise UsageError(
                f"{flag} {path}", "is not on a --mount, and pods lose all other files that they write",
                f"--mount CLAIM:{folder}, or {folder}:{folder} if all nodes share it",
                code="launch.not-mounted",
            )  # fmt: skip


def check_sbatch_args(arguments: Sequence[str]) -> None:
    """Check that each --sbatch-arg is one flag, and not one that the job sets itself.

    Raises:
        UsageError: naming it.
    """
    for argument in arguments:
        if not argument.startswith("-") or not argument.isprintable():
            raise UsageError(
                "--sbatch-arg",
                f"expected a flag of sbatch, found {argument!r}",
                "--sbatch-arg=--gpus=8",
                code="launch.sbatch-argument",
            )
        try:
            flag, *values = shlex.split(argument)
        except ValueError as error:
            raise UsageError(
                "--sbatch-arg", f"expected closed quotes, found {argument!r}", code="launch.sbatch-argument"
            ) from error
        if not _is_one_flag(flag, values):
            hint = "quote a value with spaces: --sbatch-arg=\"--comment='a b'\""
            raise UsageError(
                "--sbatch-arg", f"expected one flag, found {argument!r}", hint, code="launch.sbatch-argument"
            )
        word = flag.lstrip("-").partition("=")[0]
        name = word if flag.startswith("--") else _SHORT.get(word[:1], word)
        if name in _OWN:
            ours = _OWN[name]
            raise UsageError(
                "--sbatch-arg",
                f"{argument!r} conflicts with --{name} of the job",
                f"use {ours}" if ours else "remove it",
                code="launch.sbatch-argument",
            )


def _is_one_flag(flag: str, values: Sequence[str]) -> bool:
    """Whether these words are one flag, with or without a value: sbatch takes any other word for its script."""
    if not flag.strip("-"):
        return False
    lacks_value = "=" not in flag if flag.startswith("--") else len(flag) == 2
    return not values or (len(values) == 1 and lacks_value and values[0][:1] not in ("-", "#"))
