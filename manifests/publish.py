"""Folders that appear whole or not at all: written beside the target, then renamed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from manifests.errors import InputError, refused_by_system
from manifests.store import sync_folder

__all__ = ["check_target", "holding", "partial_of", "publishing", "sharing"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextmanager
def publishing(
    out: Path,
    *,
    force: bool,
    is_ours: Callable[[Path], bool],
    is_resumable: Callable[[Path], bool] = lambda partial: False,
    outlives_errors: bool = False,
) -> Iterator[Path]:
    """Give a folder to write in, which becomes `out` when the block ends well and vanishes when it does not.

    A kill leaves `.NAME.partial` beside `out`, and `out` as it was. The next run clears it away, or
    goes on in it where `is_resumable` says that it can; such a folder outlives an interrupt too, and any error
    where it `outlives_errors`.
    With `force`, a folder that `is_ours` recognises is replaced in one step.

    Raises:
        InputError: `out` exists and may not be replaced, or another process is writing it.
    """
    if out.name in ("", ".."):
        out = out.resolve()  # `.` has no name to write beside
    check_target(out, force, is_ours)
    partial = _make_partial(out)
    lock = _lock(partial, out)
    try:
        if _has_links(partial) or not is_resumable(partial):
            for entry in partial.iterdir():
                _remove(entry)
        yield partial
        _sync_tree(partial)
        check_target(out, force, is_ours)  # it may have come to be since
        _swap_in(partial, out)
    except BaseException as error:
        hint = _space_hint(error, out.parent)
        if not ((outlives_errors or isinstance(error, KeyboardInterrupt)) and is_resumable(partial)):
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise refused_by_system(str(error.filename or out), error, "cannot be written", hint) from error
        raise
    finally:
        os.close(lock)


@contextmanager
def sharing(out: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Give the folder that will become `out` to one of several writers: it stays when the block ends, however it does.

    Raises:
        InputError: `out` exists and may not be replaced, or a process has the folder for itself (see `publishing`).
    """
    if out.name in ("", ".."):
        out = out.resolve()
    check_target(out, force, is_ours)
    partial = _make_partial(out)
    lock = _lock(partial, out, fcntl.LOCK_SH)
    try:
        if _has_links(partial):
            raise InputError(str(partial), "holds a symbolic link, which no pack makes", "remove it")
        yield partial
    except OSError as error:
        hint = _space_hint(error, out.parent)
        raise refused_by_system(str(error.filename or out), error, "cannot be written", hint) from error
    finally:
        os.close(lock)


def check_target(out: Path, force: bool, is_ours: Callable[[Path], bool]) -> None:
    """Make sure that a folder can become `out`: it is not there, or empty, or may be replaced.

    Raises:
        InputError: it exists and may not be replaced.
    """
    if not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        return
    is_replaceable = out.is_dir() and not out.is_symlink() and is_ours(out)
    if not force:
        otherwise = ", or replace it with --force" if is_replaceable else ", or remove this yourself"
        raise InputError(str(out), "exists already", f"choose another folder{otherwise}")
    if not is_replaceable:
        raise InputError(
            str(out),
            "exists, and is not a folder that this command writes; --force does not replace it",
            "choose another folder, or remove it yourself",
        )


def partial_of(out: Path) -> Path:
    """Give the folder that `out` is written in before it has its name."""
    out = out.resolve() if out.name in ("", "..") else out
    return out.parent / f".{out.name}.partial"


def _make_partial(out: Path) -> Path:
    partial = partial_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise refused_by_system(str(out), error, "cannot be written here") from error
    return partial


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Keep a folder for this process while the block runs; it is made if it is not there.

    Raises:
        InputError: it cannot be made, or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_by_system(str(folder), error, "cannot be written here") from error
    lock = _lock(folder, folder)
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, out: Path, how: int = fcntl.LOCK_EX) -> int:
    """Hold a folder for this process, or share it with others, until the descriptor is closed."""
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        if os.stat(folder).st_ino != os.fstat(descriptor).st_ino:
            raise BlockingIOError  # the holder published or removed it meanwhile
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise InputError(str(out), "another process is writing it", "wait for that one, or stop it") from error
        raise refused_by_system(str(out), error, f"{folder} cannot be locked") from error
    return descriptor


def _has_links(folder: Path) -> bool:
    """Whether writing in a folder could write elsewhere. We make no links: somebody else put them there."""
    return any(path.is_symlink() for path in folder.rglob("*"))


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _sync_tree(folder: Path) -> None:
    for parent, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(parent))


def _swap_in(partial: Path, out: Path) -> None:
    # Commit point: one rename, so that a reader sees the old folder or the new one.
    if not out.exists() or not any(out.iterdir()):
        _rename_for_good(lambda: os.rename(partial, out), lambda: os.rename(out, partial), out.parent)
        return
    old = _lock(out, out)  # it takes the name of the partial one: nobody may write in it
    try:
        _rename_for_good(lambda: _exchange(partial, out), lambda: _exchange(partial, out), out.parent)
        shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(old)


def _rename_for_good(rename: Callable[[], None], undo: Callable[[], None], folder: Path) -> None:
    """Rename and bring that to disk, or leave both names as they were."""
    rename()
    try:
        sync_folder(folder)
    except OSError:
        undo()
        raise


def _exchange(partial: Path, out: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, bytes(partial), _AT_FDCWD, bytes(out), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise InputError(
            str(out), f"cannot be replaced in one step here: {os.strerror(code)}", "remove it, then run again"
        )


def _space_hint(error: BaseException, folder: Path) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{shutil.disk_usage(folder).free} bytes were free there"
    return ""
