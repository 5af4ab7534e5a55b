"""Atomic folder outputs: written beside the target, then renamed."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from manifests.errors import DISK_FULL, InputError, OutputError, Parameter, refused_by_system, system_errors
from manifests.store import sync_folder, write_file
from stores.folders.lock import is_shared, locking, open_locked
from stores.folders.owned import (
    RECORD_NAME,
    FindOwned,
    check_only_ours,
    check_ours,
    empty,
    record_owned,
    remove_replaced,
    remove_tree,
    write_record,
)
from stores.folders.probe import check_writable, folder_of
from stores.open import open_manifest

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_MOUNTS = "/proc/self/mountinfo"
TMPDIR = ("TMPDIR", "set TMPDIR to a folder that this user can write, on a disk with free space")

Swap = Callable[[Path, Path], None]  # exchanges the names of two folders


def exchange(partial: Path, out: Path) -> None:
    """Exchange the names of two folders atomically."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, bytes(partial), _AT_FDCWD, bytes(out), _RENAME_EXCHANGE):
        problem = f"cannot be replaced atomically on this file system: {os.strerror(ctypes.get_errno())}"
        raise OutputError(str(out), problem, "remove it, then run again", code="output.cannot-replace")


def exchange_or_rename(partial: Path, out: Path) -> None:
    """Exchange the names of two folders, by renames where the file system cannot do it atomically, such as NFS.

    Between two of them nothing is at `out`, and a kill leaves what was there as `NAME.set-aside-1`.
    """
    try:
        exchange(partial, out)
    except OutputError:
        aside = aside_of(out)
        os.rename(out, aside)
        try:
            os.rename(partial, out)
        except BaseException:
            os.rename(aside, out)
            raise
        os.rename(aside, partial)


def aside_of(path: Path) -> Path:
    """Return the name that a folder gets which makes room for another."""
    names = (path.with_name(f"{path.name}.set-aside-{number}") for number in range(1, 1000))
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def publishing(
    out: Path,
    *,
    force: bool,
    find_owned: FindOwned,
    wanted: Collection[str] = (),
    swap: Swap = exchange,
    is_resumable: Callable[[Path], bool] = lambda partial: False,
    outlives_errors: bool = False,
) -> Iterator[Path]:
    """Yield a folder to write in: it becomes `out` when the block succeeds and is removed when it fails.

    A kill leaves `.NAME.partial` beside an unchanged `out`. The next run removes it, or resumes it if `is_resumable`
    allows; such a folder also survives an interrupt, and any error if it `outlives_errors`. One with files that are not
    recorded as ours is refused: see Note [Whose a folder under construction is]. With `force`, a folder that has no
    other files than `find_owned` returns is replaced atomically (see Note [Files of others in an output]), or as `swap`
    does it. The record, from which a run may resume, is removed right before the folder becomes `out`.
    """
    if out.name in ("", ".."):
        out = out.resolve()  # `.` has no name for the partial folder
    check_target(out, force, find_owned)
    partial = partial_of(out)
    _make(partial, out)
    lock = _lock(partial, out)
    try:
        is_resumed = is_resumable(partial)
        check_ours(partial, find_owned, wanted=wanted)
    except BaseException:  # the folder belongs to another command, or to nobody whom we know
        os.close(lock)
        raise
    try:
        _drop_links(partial)
        if not is_resumed:
            record_owned(partial, find_owned)
            empty(partial)
        if not is_resumed or not (partial / RECORD_NAME).is_file():
            write_record(partial, wanted)
        if not is_free(out):  # to be replaced: check it now rather than after writing everything
            check_writable(out.parent, str(out), exchange=swap)
        yield partial
        if files := _find_replaced(out, force, find_owned):  # it may have appeared since, or files of others in it
            check_only_ours(out, files)
        _swap_in(partial, out, find_owned, swap)
    except BaseException as error:
        hint = _space_hint(error, out.parent)
        if not ((outlives_errors or isinstance(error, KeyboardInterrupt)) and is_resumable(partial)):
            with suppress(OSError):
                remove_tree(partial)
        if isinstance(error, OSError):
            where = str(error.filename or out)
            raise refused_by_system(where, error, "cannot be written", hint, code="output.unwritable") from error
        raise
    finally:
        os.close(lock)


@contextmanager
def reserving(out: Path, suffix: str = "lock") -> Iterator[Callable[[], None]]:
    """Keep other machines from writing `out` while the block runs, where its file system may be theirs, too.

    The flock of `publishing` is one on a folder, and on NFS does not leave the machine. The lock file is beside `out`,
    where a run with `--save` has its own. Yields a check that no other machine has taken it over, for right before the
    commit.
    """
    if not is_shared(folder_of(out)):
        yield lambda: None
        return
    path = partial_of(out).with_suffix(f".{suffix}")
    with system_errors(out, "cannot be created", code="output.unwritable"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locking(path, str(out), "is writing to it") as check:
        yield check


@contextmanager
def scratch_beside(out: Path, wanted: Collection[str]) -> Iterator[tuple[Path, int]]:
    """Yield an empty folder for the `wanted` files beside `out`, and the descriptor of its lock; remove it afterwards.

    A process that inherits the descriptor keeps the lock. What a killed process left in the folder is never used again.
    """
    folder = partial_of(out).with_suffix(".init")
    with reserving(out, "init.lock"):
        _make(folder, out)
        lock = _lock(folder, out)
        try:
            check_ours(folder, lambda _: None, wanted=wanted)
            try:
                with writing_to(str(folder)):
                    empty(folder)
                    write_record(folder, wanted)
                yield folder, lock
            finally:
                with suppress(OSError):
                    remove_tree(folder)
        finally:
            os.close(lock)


def check_target(out: Path, force: bool, find_owned: FindOwned, swap: Swap | None = None) -> None:
    """Check that `out` can be written: it does not exist, is empty, or may be replaced, by `swap` if that is set."""
    check_not_mounted(out)
    if _has_working_folder(out):
        problem = "is or has the working folder, which would be replaced: the shell would stay in a deleted one"
        hint = f"run the command beside it, with {out.resolve().name or 'the folder'} as the output"
        raise OutputError(str(out), problem, hint, code="output.working-folder")
    if files := _find_replaced(out, force, find_owned):
        check_only_ours(out, files)
    if swap is not None and not is_free(out):
        check_writable(out.parent, str(out), exchange=swap)


def _find_replaced(out: Path, force: bool, find_owned: FindOwned) -> Collection[str]:
    """Return the files of ours in the folder to replace; none if it does not exist or is empty."""
    if is_free(out):
        return ()
    files = find_owned(out) if out.is_dir() and not out.is_symlink() else None
    if not force:
        otherwise = f"replace it with {Parameter('force', True)}" if files is not None else "remove it"
        raise OutputError(str(out), "already exists", f"choose another folder, or {otherwise}", code="output.exists")
    if files is None:
        raise OutputError(
            str(out),
            f"already exists and was not written by this command; {Parameter('force', True)} does not replace it",
            "choose another folder, or remove it",
            code="output.not-ours",
        )
    return files


def check_not_a_step(out: Path) -> None:
    """Refuse to replace a checkpoint of a training run, under the name that the run has given it."""
    training = None
    with suppress(InputError):
        manifest = open_manifest(out).manifest
        training = manifest.training if manifest.created_by.startswith("runner ") else None
    if training is not None and Path(os.path.abspath(out)).name == f"step-{training.step:06d}":
        state = " with optimizer state" if training.optimizer is not None else ""
        problem = (
            f"is a run's checkpoint of step {training.step}{state}, which {Parameter('force', True)} does not replace"
        )
        hint = "choose another folder, or remove the checkpoint yourself"
        raise OutputError(str(out), problem, hint, code="output.is-a-step")


def check_not_mounted(out: Path) -> None:
    """Refuse an output that nothing can be renamed to."""
    if not out.is_symlink() and out.is_dir() and _is_mounted(out):
        problem = "is a mount point: an output is written beside its folder, and renamed when it is complete"
        raise OutputError(str(out), problem, f"use a subfolder, such as {out / 'packed'}", code="output.mount-point")


def is_free(out: Path) -> bool:
    """Return whether `out` does not exist or is an empty folder."""
    return not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))


def _has_working_folder(out: Path) -> bool:
    try:
        return Path(os.getcwd()).is_relative_to(out.resolve())
    except OSError:  # deleted already; or a link that leads nowhere
        return False


def _is_mounted(folder: Path) -> bool:
    if os.path.ismount(folder):
        return True
    try:
        lines = Path(_MOUNTS).read_bytes().splitlines()  # a bind mount can be on its parent's file system
    except OSError:
        return False
    mounted = os.fsencode(os.path.realpath(folder))
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes((byte,)) for byte in mounted)
    return any(line.split(b" ")[4] == escaped for line in lines)


def check_partial(out: Path, find_owned: FindOwned) -> None:
    """Refuse, before there is anything to write, what `publishing` refuses in the folder under construction."""
    if (partial := partial_of(out)).is_dir():
        check_ours(partial, find_owned)


def partial_of(out: Path) -> Path:
    """Return the folder in which `out` is written before it is renamed."""
    out = out.resolve() if out.name in ("", "..") else out
    return out.parent / f".{out.name}.partial"


def _make(folder: Path, out: Path) -> None:
    with system_errors(out, "cannot be created", code="output.unwritable"):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)


def _lock(folder: Path, out: Path) -> int:
    """Lock a folder until the descriptor is closed."""
    try:
        descriptor = open_locked(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # published or removed by its owner meanwhile
        descriptor = None
    except OSError as error:
        raise refused_by_system(str(out), error, f"{folder} cannot be locked", code="output.cannot-lock") from error
    if descriptor is None:
        hint = "wait for that process, or stop it"
        raise OutputError(str(out), "another process is writing to it", hint, code="output.in-use")
    return descriptor


def _drop_links(partial: Path) -> None:
    """Remove symbolic links from a folder that an earlier run left, so that nothing is written through them."""
    for path in partial.rglob("*"):
        if path.is_symlink():
            path.unlink()


def _sync_tree(folder: Path) -> None:
    for parent, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(parent))


def _swap_in(partial: Path, out: Path, find_owned: FindOwned, swap: Swap) -> None:
    # Commit point: one rename, so that readers see either the old folder or the new one; see `exchange_or_rename`.
    if out.exists():
        _take_after(out, partial)
    if is_free(out):
        _sync_tree(partial)
        with _removed(partial / RECORD_NAME):
            _rename_for_good(lambda: os.rename(partial, out), lambda: os.rename(out, partial), out.parent)
        return
    old = _lock(out, out)  # it gets the name of the partial folder, in which nobody may write
    try:
        files = find_owned(out) or ()
        _sync_tree(partial)
        with _removed(partial / RECORD_NAME):
            _rename_for_good(lambda: swap(partial, out), lambda: swap(partial, out), out.parent)
        if not os.path.lexists(partial / RECORD_NAME):
            with suppress(OSError):  # as in `remove_replaced`
                partial.chmod(0o700 | partial.stat().st_mode)
                write_record(partial, files)
                files = {*files, RECORD_NAME}
        remove_replaced(partial, files)
    finally:
        os.close(old)


@contextmanager
def _removed(path: Path) -> Iterator[None]:
    """Remove a file while the block runs, and for good when it ends well: a power failure does not bring it back."""
    with open(path, "rb") as removed:
        path.unlink()
        try:
            sync_folder(path.parent)
            yield
        except BaseException:
            with suppress(OSError):
                write_file(path, iter(lambda: removed.read(1 << 20), b""))
            raise


def _take_after(out: Path, partial: Path) -> None:
    """Copy owner and mode of the folder that is replaced, as far as permitted; the record is yet to be removed."""
    replaced = out.stat()
    with suppress(OSError):
        os.chown(partial, replaced.st_uid, replaced.st_gid)
    with suppress(OSError):
        os.chmod(partial, replaced.st_mode & 0o7777 | 0o700)


def _rename_for_good(rename: Callable[[], None], undo: Callable[[], None], folder: Path) -> None:
    """Rename and fsync, or undo the rename."""
    rename()
    try:
        sync_folder(folder)
    except BaseException:  # an interrupt too: what was replaced must not get the journal of the new one
        undo()
        raise


@contextmanager
def writing_to(where: str, hint: str = "") -> Iterator[None]:
    """Raise OutputError for what the system refuses while the block writes there."""
    with system_errors(where, "cannot be written", hint, code="output.unwritable", names_file=True):
        yield


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder below TMPDIR, and remove it afterwards."""
    with writing_to(*TMPDIR):
        folder = TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    with folder as path:
        yield Path(path)


def _space_hint(error: BaseException, folder: Path) -> str:
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"free some space; {shutil.disk_usage(folder).free} bytes were available"
    return ""
