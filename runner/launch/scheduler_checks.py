"""What a job asks of a scheduler, looked at before the scheduler sees it: values that it would take wrong. No torch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from manifests.errors import UsageError
from manifests.store import find_manifest
from stores.address import is_url

__all__ = [
    "check_mounts",
    "check_read",
    "check_sbatch_args",
    "check_texts",
    "check_written",
    "is_shown",
    "parse_signal",
    "parse_time",
    "shown_address",
]

_SIGNAL = re.compile(r"USR2@(\d{1,5})")
_MAX_SIGNAL_S = 65535  # sbatch(1), --signal
_TIME = re.compile(r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?|(?P<n>\d+(?::\d+){0,2}))")
_FOREVER = ("unlimited", "infinite")

# What a line for sbatch may not say, because the job is planned with it, and the flag that says it.
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
    """Read USR2@SECONDS, and give the seconds.

    Raises:
        UsageError: another signal, or no such number.
    """
    match = _SIGNAL.fullmatch(text)
    if match and 0 < int(match[1]) <= _MAX_SIGNAL_S:
        return int(match[1])
    hint = f"seconds before the end, 1 to {_MAX_SIGNAL_S}, such as USR2@120"
    if not text.startswith("USR2"):
        hint = "torchrun dies of SIGUSR1 and leaves its ranks behind; the runner saves and stops at SIGUSR2"
    raise UsageError("--signal", f"expected USR2@SECONDS, found {text!r}", hint, code="launch.scheduler-value")


def parse_time(text: str) -> int | None:
    """Read a time limit as sbatch does, and give its seconds; None: there is no limit.

    Raises:
        UsageError: sbatch would not take it.
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
    """Raise unless each flag's value, if there is one, is a text that fits on a line.

    Raises:
        UsageError: naming the flag.
    """
    for flag, value in given:
        if value is None:
            continue
        if not value.strip() or not value.isprintable() or (without_spaces and " " in value):
            what = "a word" if without_spaces else "a text on one line"
            raise UsageError(flag, f"expected {what}, found {value!r}", code="launch.scheduler-value")


def check_mounts(mounts: Sequence[str], form: re.Pattern[str], expected: str) -> None:
    """Raise unless every mount has a form, whose last group is the folder that it is shown as, and none is shown twice.

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
                "--mount", f"{seen[target]!r} and {mount!r} are both shown as {target}", code="launch.mount"
            )
        seen[target] = mount


def is_shown(path: Path, mounts: Sequence[str]) -> bool:
    """Whether a mount shows this file, named by an absolute path, in a container."""
    return any(path.is_relative_to(mount.rpartition(":")[2]) for mount in mounts)


def shown_address(address: str, written: str, mounts: Sequence[str]) -> str:
    """Give a manifest's address as a container sees it: where a mount shows it only as it is written, so."""
    path = Path(os.path.normpath(Path.cwd() / written))
    is_named = not is_url(address) and not is_shown(Path(address), mounts) and is_shown(path, mounts)
    return str(find_manifest(path)) if is_named else address


def check_read(paths: Iterable[tuple[str, str]], mounts: Sequence[str]) -> None:
    """Raise where a path that pods read, given after its flag, is relative and lies on no mount; the image has others.

    Raises:
        UsageError: naming the flag and the path.
    """
    here = Path.cwd()
    for flag, given in paths:
        if not Path(given).is_absolute() and not is_shown(Path(os.path.normpath(here / given)), mounts):
            raise UsageError(
                f"{flag} {given}", f"is looked up in {here}, and no --mount shows it there to the pods",
                "name a path from / on: below a --mount, or of the image", code="launch.not-mounted")  # fmt: skip


def check_written(paths: Iterable[tuple[str, str]], mounts: Sequence[str]) -> None:
    """Raise unless a mount shows every path that pods write, given after its flag; relative ones begin at this folder.

    Raises:
        UsageError: naming the flag and the path.
    """
    here = Path.cwd()
    for flag, given in paths:
        if not Path(given).is_absolute() and not is_shown(here, mounts):
            raise UsageError(
                f"{flag} {given}", f"is looked up in {here}, and no --mount shows that to the pods",
                "name a path from / on that lies below a --mount", code="launch.not-mounted")  # fmt: skip
        path = Path(os.path.normpath(here / given))
        if not is_shown(path, mounts):
            folder = path if path.parent == Path("/") else path.parent
            raise UsageError(
                f"{flag} {path}", "lies on no --mount: pods keep no other files that they write",
                f"--mount CLAIM:{folder}, or {folder}:{folder} where it is every node's",
                code="launch.not-mounted",
            )  # fmt: skip


def check_sbatch_args(arguments: Sequence[str]) -> None:
    """Raise where a line for sbatch is not one flag, or undoes what the job is planned with.

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
                "--sbatch-arg", f"expected quotes in pairs, found {argument!r}", code="launch.sbatch-argument"
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
                f"{argument!r} is not for you to say: the job is planned with its own --{name}",
                f"{ours} says it" if ours else "leave it out",
                code="launch.sbatch-argument",
            )


def _is_one_flag(flag: str, values: Sequence[str]) -> bool:
    """Whether these words are a flag, and its value at most: sbatch takes any other word for its script."""
    if not flag.strip("-"):
        return False
    lacks_value = "=" not in flag if flag.startswith("--") else len(flag) == 2
    return not values or (len(values) == 1 and lacks_value and values[0][:1] not in ("-", "#"))
