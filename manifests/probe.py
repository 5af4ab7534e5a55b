"""Whether a folder takes what will be written to it later: probed with a small file, before the work begins."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from manifests.console import STDOUT, check_open
from manifests.errors import InputError, OutputError, refused_by_system
from manifests.fixed import is_fixed

__all__ = [
    "check_new_file",
    "check_room",
    "check_stdout",
    "check_writable",
    "folder_of",
    "nearest_folder",
    "print_result",
]

_PREFIX = ".probe-"
_NBYTES = 4096


def nearest_folder(path: Path) -> Path:
    """Return the folder that decides whether `path` can be created: the nearest of those above it that exists."""
    path = Path(os.path.abspath(path))
    return next((above for above in (path, *path.parents) if os.path.lexists(above)), path)


def folder_of(out: Path) -> Path:
    """Return the folder whose disk an output takes its space from, whether the output exists or not."""
    return nearest_folder(out if is_fixed(out) else Path(os.path.abspath(out)).parent)


def check_writable(
    folder: Path, where: str, hint: str = "", *, exchange: Callable[[Path, Path], None] | None = None
) -> None:
    """Make sure that a folder, or the nearest one above it that exists, takes a file: written, synced and renamed.

    `exchange` is what replaces an existing output in one step, where that is what will be done. Nothing is left behind.

    Raises:
        InputError: naming `where`; UnreachableError where the disk or its mount fails.
    """
    above = nearest_folder(folder)
    try:
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder")
        probe = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above))
        try:
            _write_in(probe)
            if exchange is not None:
                _exchange_in(probe, exchange)
        finally:
            shutil.rmtree(probe, ignore_errors=True)
    except OSError as error:
        raise refused_by_system(where, error, f"{above} cannot be written", hint, code="output.unwritable") from error
    except InputError as error:
        raise OutputError(where, error.problem, error.hint, code="output.cannot-replace") from error


def check_new_file(path: Path, flag: str, *, force: bool) -> None:
    """Make sure that a file can be written at `path` later, and replaces none unless `force` says so.

    Raises:
        InputError: it exists, its folder does not, or that takes no file.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{flag} {path}", f"{path.parent} is not a folder", code="output.unwritable")
    if path.is_dir():
        raise OutputError(f"{flag} {path}", "is a folder", "name a file in it", code="output.unwritable")
    if path.exists() and not force:
        hint = f"choose another {flag}, or replace it with --force"
        raise OutputError(str(path), "exists already", hint, code="output.exists")
    check_writable(path.parent, f"{flag} {path}")


def check_stdout() -> None:
    """Make sure that a result can be printed later, as far as that can be known.

    Raises:
        InputError: standard output is closed, or a file on a full disk.
    """
    check_open()
    try:
        mode, disk = os.fstat(1).st_mode, os.fstatvfs(1)
    except OSError as error:
        raise refused_by_system(STDOUT, error, "cannot be written", code="output.unwritable") from error
    if stat.S_ISREG(mode) and disk.f_blocks and not disk.f_bavail:
        raise OutputError(STDOUT, "is a file on a full disk", "redirect it to another one", code="output.disk-full")


def print_result(text: str) -> None:
    """Print what a command was asked for.

    Raises:
        InputError: standard output does not take it.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is buffered would be tried again at exit
        raise refused_by_system(STDOUT, error, "cannot be written", code="output.unwritable") from error


def check_room(needs: Iterable[tuple[str, Path, int]]) -> None:
    """Make sure that the disks have room for all of these together: a flag, its folder and the bytes it needs.

    Raises:
        InputError: naming the first flag whose disk has less.
    """
    needed: dict[int, int] = {}
    for where, path, nbytes in needs:
        above = nearest_folder(path)
        with contextlib.suppress(OSError):  # a disk that does not tell is met by what is written
            device, disk = os.stat(above).st_dev, os.statvfs(above)
            needed[device] = needed.get(device, 0) + nbytes
            free = disk.f_bavail * disk.f_frsize
            if disk.f_blocks and needed[device] > free:  # some file systems count nothing
                raise OutputError(
                    where, f"{needed[device]} bytes needed, {free} free in {above}", "choose another disk",
                    code="output.disk-full",
                )  # fmt: skip


def _write_in(folder: Path) -> None:
    partial = folder / "partial"
    with open(partial, "wb") as file:
        file.write(bytes(_NBYTES))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / "whole")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange_in(folder: Path, exchange: Callable[[Path, Path], None]) -> None:
    new, old = folder / "new", folder / "old"
    new.mkdir()
    old.mkdir()
    exchange(new, old)
