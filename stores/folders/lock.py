"""Locks on files and folders: for this machine's processes (`open_locked`), or for those of any machine (`locking`).

# Note [Lock files]
A lock file is a small file that names its owner, locked with flock. That excludes processes of one machine, and of
several if the file system propagates locks: NFS does for files (not folders), Lustre if mounted with `flock`. Otherwise
its heartbeat decides: the owner touches the file every few seconds. An owner on another machine is dead if it has not
done so for `stale_s`, and this process has seen none for as long, or for three heartbeats if the last is that old by
the file system's clock: Lustre and CephFS store the clock of the machine that touches. An owner on this machine is
looked up by its process. Locks of dead owners are taken over, even if a child process of theirs, or a file server,
still has the flock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from manifests.errors import InputError, LaunchError, system_errors

_BEAT_S = 5.0
_STALE_S = 60.0
_SETTLE_S = 2.0
_ASK_AGAIN_S = 0.1
_UNNAMED_S = 2.0  # within which the process that got the flock has written its name
_RELEASED = (errno.ENOENT, errno.ESTALE)  # the owner has removed its lock file; NFS answers either
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "wekafs", "9p")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process, this one by default, with the machine, boot and PID namespace that its PID refers to."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    birth: str = field(default_factory=lambda: birth_of(os.getpid()) or "")
    namespace: str = field(default_factory=lambda: pid_namespace())

    @property
    def is_local(self) -> bool:
        """Whether it can be looked up by its PID."""
        boot, _, _ = (birth_of(os.getpid()) or "").partition(" ")
        is_here = bool(boot) and self.birth.partition(" ")[0] == boot and self.namespace == pid_namespace()
        return is_here and not _is_hidden(self.pid)

    @property
    def is_alive(self) -> bool:
        """Whether it is running; for local processes only."""
        return birth_of(self.pid) == self.birth


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owner(Process):
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    doing: str = ""


def birth_of(pid: int) -> str | None:
    """Return the start time of a process, in a form unique to it; None if it has exited."""
    try:
        # The program's name, in parentheses, may contain anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else f"{boot} {fields[18]}"


def _is_hidden(pid: int) -> bool:
    """Return whether a process of another user is running that /proc does not show; see `hidepid` in proc(5)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not os.access(f"/proc/{pid}/stat", os.R_OK)
    except (ProcessLookupError, OverflowError):
        pass
    return False


def pid_namespace() -> str:
    """Return the process namespace in which this process's number means something."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def open_locked(path: Path, flags: int) -> int | None:
    """Open and lock a file or folder until the descriptor is closed, or the process ends.

    None: another process has locked it, or has just removed or renamed it.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if _flock(descriptor) and _is_at(path, descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@contextlib.contextmanager
def locking(
    path: Path,
    where: str,
    doing: str,
    *,
    stale_s: float = _STALE_S,
    patience_s: float = 0.0,
    may_be_removed: bool = False,
) -> Iterator[Callable[[], None]]:
    """Lock something for this process while the block runs; `path` is the lock file, whose folder exists.

    What another process has locked is waited for as long as `patience_s`.

    Yields a check that the lock was not taken over, as from a machine that was suspended for `stale_s`. If the file
    `may_be_removed`, as by somebody who clears up during a long run, one that is missing does not fail it.
    """
    claimant = _Owner(doing=doing)
    with system_errors(where, f"{path} cannot be written", code="output.unwritable"):
        descriptor = _acquire_in_time(path, claimant, where, stale_s, patience_s)
    ended = threading.Event()
    toucher = threading.Thread(
        target=_touch, args=(descriptor, claimant.nonce, ended), name="lock heartbeat", daemon=True
    )
    toucher.start()

    def check() -> None:
        with system_errors(where, f"{path} cannot be read", code="output.unreadable"):
            owner = _read_again(path)
        if not may_be_removed if owner is None else owner.nonce != claimant.nonce:
            raise _in_use(where, owner)

    try:
        yield check
    finally:
        ended.set()
        toucher.join(_BEAT_S)  # a hanging disk may block it
        with contextlib.suppress(OSError):
            if (owner := _read_again(path)) is not None and owner.nonce == claimant.nonce:
                path.unlink()  # otherwise, whoever has taken it over removes it
        os.close(descriptor)


def _acquire_in_time(path: Path, claimant: _Owner, where: str, stale_s: float, patience_s: float) -> int:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return _acquire(path, claimant, where, stale_s)
        except LaunchError:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_ASK_AGAIN_S)


def _acquire(path: Path, claimant: _Owner, where: str, stale_s: float) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            is_locked = _flock_if_supported(descriptor)
            owner = _read(descriptor) if is_locked else _read_named(descriptor)
            if not _is_at(path, descriptor):  # released or taken over meanwhile
                os.close(descriptor)
                continue
            if owner is not None and _is_alive(owner, path, descriptor, stale_s):
                raise _in_use(where, owner)
            if owner is None and not is_locked:
                raise _in_use(where, None)
            if not is_locked:  # a child of a dead owner has the flock
                _remove_judged(path, descriptor)
                os.close(descriptor)
                continue
            _write(descriptor, claimant)
            if is_shared(path):
                time.sleep(_SETTLE_S)
                if (winner := _read_again(path)) is not None and winner.nonce != claimant.nonce:
                    raise _in_use(where, winner)
            return descriptor
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            if not isinstance(error, OSError) or error.errno not in _RELEASED:
                raise


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flock_if_supported(descriptor: int) -> bool:
    """Return whether the file could be locked; True on a file system without locks."""
    try:
        return _flock(descriptor)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_alive(owner: _Owner, path: Path, descriptor: int, stale_s: float) -> bool:
    """Return whether an owner is alive: by its process, or on another machine by waiting for its heartbeat."""
    if owner.is_local:
        return owner.is_alive
    first, begun_s = os.fstat(descriptor).st_mtime_ns, time.monotonic()
    while True:
        last = _touched_ns(path)
        if last != first:
            return True
        watched_s = time.monotonic() - begun_s
        with tempfile.TemporaryFile(dir=path.parent) as now:
            age_s = (os.fstat(now.fileno()).st_mtime_ns - last) / 1e9
        if watched_s > stale_s or (age_s > stale_s and watched_s > min(3 * _BEAT_S, stale_s)):
            return False
        time.sleep(min(1.0, stale_s / 4))


def _touched_ns(path: Path) -> int:
    """Reopen a lock file and return when it was touched: NFS may answer `stat` from its cache for minutes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _remove_judged(path: Path, descriptor: int) -> None:
    """Remove the file of a dead owner, but not one that has replaced it since."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if os.stat(aside).st_ino != os.fstat(descriptor).st_ino:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _read(descriptor: int) -> _Owner | None:
    try:
        texts = {name: str(value) for name, value in json.loads(os.pread(descriptor, 1 << 16, 0)).items()}
        return _Owner(pid=int(texts.pop("pid")), **texts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _read_named(descriptor: int) -> _Owner | None:
    """Read an owner that may have just got the flock and not yet written its name."""
    until_s = time.monotonic() + _UNNAMED_S
    while (owner := _read(descriptor)) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    return owner


def _read_again(path: Path) -> _Owner | None:
    """Reopen and read a lock file: NFS revalidates its cache when a file is opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, owner: _Owner) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
    os.fsync(descriptor)


def _touch(descriptor: int, nonce: str, ended: threading.Event) -> None:
    """Touch a lock file while it names this owner: whoever has taken it over may be dead, which others must see."""
    while not ended.wait(_BEAT_S):
        with contextlib.suppress(OSError):
            if (owner := _read(descriptor)) is not None and owner.nonce != nonce:
                return
            os.utime(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def is_shared(path: Path) -> bool:
    """Return whether several machines may share this path's disk, judging by the type of its file system."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            if words[2] == number:
                kind = words[words.index("-") + 1]
                return kind in _SHARED or kind.startswith("fuse")
    return False


def _in_use(where: str, owner: _Owner | None) -> InputError:
    who = "another process uses it" if owner is None else f"process {owner.pid} on {owner.host} {owner.doing}"
    hint = "wait for that process, stop it, or choose another folder"
    return LaunchError(where, who, hint, code="launch.folder-in-use")
