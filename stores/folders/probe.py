"""Checks that an output can be written, made before the work begins with a small probe file."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from manifests.command.console import STDOUT, check_open
from manifests.command.sizes import show_bytes
from manifests.digest import PREFIX, digest_bytes
from manifests.errors import InputError, OutputError, Parameter, refused_by_system, system_errors
from manifests.store import write_file
from stores.folders.lock import birth_of, pid_namespace

# A probe is named after its process, so that what a kill leaves is known to be nobody's by the next one.
_NAME = re.compile(r"\.probe-([0-9a-f]{8})-([0-9]+)-([0-9]+)-.+")
_NBYTES = 4096


def nearest_folder(path: Path) -> Path:
    """Return the nearest existing folder at or above `path`, in which it would be created."""
    path = Path(os.path.abspath(path))
    return next((above for above in (path, *path.parents) if os.path.lexists(above)), path)


def folder_of(out: Path) -> Path:
    """Return the folder on whose disk an output takes space, whether the output exists or not."""
    return nearest_folder(Path(os.path.abspath(out)).parent)


def check_writable(
    folder: Path, where: str, hint: str = "", *, exchange: Callable[[Path, Path], None] | None = None
) -> None:
    """Check that a file can be written, fsynced and renamed in a folder, or in the nearest existing one above it.

    If an existing output will be replaced, `exchange` is tried too. Nothing is left behind.
    """
    above = nearest_folder(folder)
    try:
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder")
        _remove_left_probes(above)
        probe = Path(tempfile.mkdtemp(prefix=_prefix(), dir=above))
        try:
            write_file(probe / "whole", bytes(_NBYTES))
            if exchange is not None:
                for name in ("new", "old"):
                    (probe / name).mkdir()
                exchange(probe / "new", probe / "old")
        finally:
            shutil.rmtree(probe, ignore_errors=True)
    except OSError as error:
        raise refused_by_system(where, error, f"failed to write {above}", hint, code="output.unwritable") from error
    except InputError as error:
        raise OutputError(where, error.problem, error.hint, code="output.cannot-replace") from error


def can_link(file: Path, folder: Path) -> bool:
    """Return whether a folder can contain a hard link to a file; nothing is left behind."""
    try:
        probe = Path(tempfile.mkdtemp(prefix=_prefix(), dir=folder))
        try:
            os.link(file, probe / "link")
        finally:
            shutil.rmtree(probe, ignore_errors=True)
    except OSError:
        return False
    return True


def check_new_file(path: Path, flag: str, *, force: bool) -> None:
    """Check that a file can be written at `path` later, without replacing one unless `force`."""
    if not path.parent.is_dir():
        raise OutputError(f"{flag} {path}", f"{path.parent} is not a folder", code="output.unwritable")
    if path.is_dir():
        raise OutputError(
            f"{flag} {path}", "expected a file, found a folder", "name a file in it", code="output.unwritable"
        )
    if path.exists() and not force:
        hint = f"choose another {flag}, or replace it with {Parameter('force', True)}"
        raise OutputError(str(path), "already exists", hint, code="output.exists")
    check_writable(path.parent, f"{flag} {path}", "choose a folder that this user can write to")


def check_stdout() -> None:
    """Check that a result can probably be printed later."""
    check_open()
    with system_errors(STDOUT, "cannot be written", code="output.unwritable"):
        mode, disk = os.fstat(1).st_mode, os.fstatvfs(1)
    if stat.S_ISREG(mode) and disk.f_blocks and not disk.f_bavail:
        raise OutputError(
            STDOUT, "the disk of the output file is full", "redirect to another one", code="output.disk-full"
        )


def print_result(text: str) -> None:
    """Print a command's result."""
    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the buffered text would be retried at exit
        raise refused_by_system(STDOUT, error, "cannot be written", code="output.unwritable") from error


def check_room(needs: Iterable[tuple[str, Path, int]]) -> None:
    """Check the free space of the disks for all outputs together: (flag, path, bytes)."""
    needed: dict[int, int] = {}
    for where, path, nbytes in needs:
        above = nearest_folder(path)
        with contextlib.suppress(OSError):  # unknown free space: writing will fail if there is too little
            device, disk = os.stat(above).st_dev, os.statvfs(above)
            needed[device] = needed.get(device, 0) + nbytes
            free = disk.f_bavail * disk.f_frsize
            if disk.f_blocks and needed[device] > free:  # some file systems report 0 blocks
                raise OutputError(
                    where, f"expected {show_bytes(needed[device])} free in {above}, found {show_bytes(free)}",
                    "choose another disk",
                    code="output.disk-full",
                )  # fmt: skip


def _prefix() -> str:
    _, _, begun = (birth_of(os.getpid()) or "").partition(" ")
    return f".probe-{_machine()}-{os.getpid()}-{begun or 0}-"


def _machine() -> str:
    """Return a name for this machine since its start, and this namespace: other processes cannot be looked up here."""
    boot, _, _ = (birth_of(os.getpid()) or "").partition(" ")
    return digest_bytes(f"{boot} {pid_namespace()}".encode()).removeprefix(PREFIX)[:8]


def _remove_left_probes(folder: Path) -> None:
    """Remove the probes of processes of this machine that have ended."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            match = _NAME.fullmatch(entry.name)
            if match is None or match[1] != _machine() or entry.is_symlink():
                continue
            if (birth_of(int(match[2])) or "").partition(" ")[2] != match[3]:
                shutil.rmtree(entry, ignore_errors=True)
