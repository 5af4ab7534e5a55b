"""A place claimed by one process at a time, on any machine: who has it, whether it is alive, how it is taken over.

# Note [Claims]
A claim is a small file that names its holder, locked with flock. That keeps processes of one machine apart, and of
several where the file system passes locks on: NFS does, of files and not of folders; Lustre when mounted with `flock`.
Where it does not, the file tells: its holder touches it every few seconds, and a holder on another machine that has
not done so for `stale_s`, by the clock of the file system, is dead. One on this machine is looked up by its process.
Claims of dead holders are taken over, also where a child of theirs, or a file server, still keeps the lock.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from manifests.errors import InputError, LaunchError, refused_by_system

__all__ = ["birth_of", "locking", "pid_namespace"]

_BEAT_S = 5.0
_STALE_S = 60.0
_SETTLE_S = 2.0
_UNNAMED_S = 2.0  # who has the lock has named itself by then
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "wekafs", "9p")


def birth_of(pid: int) -> str | None:
    """Return when a process began, as a text that no other process has; None if it has ended."""
    try:
        # The name of its program, in brackets, may contain anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else f"{boot} {fields[18]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holder:
    """A process: on which machine, under which kernel and process namespace its number means something."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    birth: str = field(default_factory=lambda: birth_of(os.getpid()) or "")
    namespace: str = field(default_factory=lambda: pid_namespace())
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    doing: str = ""

    @property
    def is_here(self) -> bool:
        own = birth_of(os.getpid()) or ""
        return self.birth.partition(" ")[0] == own.partition(" ")[0] and self.namespace == pid_namespace()

    @property
    def is_alive(self) -> bool:
        """Whether it is alive; for processes of this machine only."""
        return birth_of(self.pid) == self.birth


@contextlib.contextmanager
def locking(path: Path, where: str, doing: str, *, stale_s: float = _STALE_S) -> Iterator[None]:
    """Claim a place for this process while the block runs; `path` is the claim's own file, whose folder exists.

    Raises:
        InputError: another process has it, which is named with what it is `doing`; or the file cannot be written.
    """
    own = _Holder(doing=doing)
    try:
        descriptor = _acquire(path, own, where, stale_s)
    except OSError as error:
        raise refused_by_system(where, error, f"{path} cannot be written", code="output.unwritable") from error
    ended = threading.Event()
    toucher = threading.Thread(target=_touch, args=(descriptor, ended), name="claim", daemon=True)
    toucher.start()
    try:
        yield
    finally:
        ended.set()
        toucher.join(_BEAT_S)  # a disk that hangs keeps it
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path, own: _Holder, where: str, stale_s: float) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            is_locked = _lock(descriptor)
            holder = _read(descriptor) if is_locked else _read_named(descriptor)
            if not _is_at(path, descriptor):  # released, or taken over, meanwhile
                os.close(descriptor)
                continue
            if holder is not None and _lives(holder, path, descriptor, stale_s):
                raise _in_use(where, holder)
            if holder is None and not is_locked:
                raise _in_use(where, None)
            if not is_locked:  # by what is left of a dead holder
                _put_away(path, descriptor)
                os.close(descriptor)
                continue
            _write(descriptor, own)
            if _is_shared(path):
                time.sleep(_SETTLE_S)
                if (winner := _read_again(path)) is not None and winner.nonce != own.nonce:
                    raise _in_use(where, winner)
            return descriptor
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise


def _lock(descriptor: int) -> bool:
    """Lock the file, and return whether no other process has it locked; True on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _lives(holder: _Holder, path: Path, descriptor: int, stale_s: float) -> bool:
    """Whether a holder is alive, by its process, or on another machine by its heartbeats, which are waited for."""
    if holder.is_here:
        return holder.is_alive
    first = os.fstat(descriptor).st_mtime_ns
    while True:
        last = os.stat(path).st_mtime_ns
        if last != first:
            return True
        with tempfile.TemporaryFile(dir=path.parent) as now:
            if (os.fstat(now.fileno()).st_mtime_ns - last) / 1e9 > stale_s:
                return False
        time.sleep(min(1.0, stale_s / 4))


def _put_away(path: Path, descriptor: int) -> None:
    """Remove the file that was judged, and no other that has taken its name since."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if os.stat(aside).st_ino != os.fstat(descriptor).st_ino:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _read(descriptor: int) -> _Holder | None:
    try:
        found = json.loads(os.pread(descriptor, 1 << 16, 0))
        return _Holder(**{**found, "pid": int(found["pid"])})
    except (ValueError, TypeError, KeyError):
        return None


def _read_named(descriptor: int) -> _Holder | None:
    """Read a holder that may have got its lock just now, and not have named itself yet."""
    until_s = time.monotonic() + _UNNAMED_S
    while (holder := _read(descriptor)) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    return holder


def _read_again(path: Path) -> _Holder | None:
    """Read a claim's file again: NFS looks for what others have written when a file is opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, holder: _Holder) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
    os.fsync(descriptor)


def _touch(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _is_shared(path: Path) -> bool:
    """Whether machines may share this file's disk, as far as the kind of its file system tells."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            if words[2] == number:
                kind = words[words.index("-") + 1]
                return kind in _SHARED or kind.startswith("fuse")
    return False


def pid_namespace() -> str:
    """Return the process namespace in which this process's number means something."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _in_use(where: str, holder: _Holder | None) -> InputError:
    who = "another process uses it" if holder is None else f"process {holder.pid} on {holder.host} {holder.doing}"
    return LaunchError(where, who, "wait for that one, stop it, or choose another folder", code="launch.folder-in-use")
