"""Which process writes a part of a pack: its lock, and its claim, a file beside the parts' records.

A claim is renewed while its owner works; one that is old is lost, and another process may claim its part. Each is a new
file with a number, which only one process can create. Its time is set by the file system, whose clock alone counts. A
process that was only stopped, and continues, does no harm: both write the same bytes.
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from manifests.errors import InputError, OutputError
from reshard.plans.partition import Part

__all__ = ["RENEWED_S", "Claims", "is_locked_for_us", "locked_part", "renewing"]

RENEWED_S = 5.0
_IN_USE = "output.in-use"


class Claims:
    """The claims in a folder of records. A part that no process has renewed for `lost_after_s` is lost."""

    def __init__(self, records: Path, begun: Path, lost_after_s: float | None) -> None:
        self._records, self._begun = records, begun  # a file from when the first part began
        self._lost_after_s = lost_after_s
        self.every_s = RENEWED_S if lost_after_s is None else min(RENEWED_S, lost_after_s / 3)

    @contextmanager
    def claimed(self, part: Part) -> Iterator[None]:
        """Claim a part, whoever has it, and renew the claim until the block ends."""
        while not (claim := self._next(part)):
            pass
        with self._renewed(claim):
            yield

    @contextmanager
    def taken_over(self, part: Part) -> Iterator[bool]:
        """Claim a part if it is lost, or was not begun in that time; yield whether this process has it."""
        claim = None
        with suppress(FileNotFoundError):  # all are done, and committed
            claim = self._next(part) if self._is_lost(part) else None
        if claim is None:
            yield False
            return
        with self._renewed(claim):
            yield True

    def _is_lost(self, part: Part) -> bool:
        clock = self._records / f".clock-{uuid.uuid4().hex}"
        with open(clock, "xb"):
            now_s = clock.stat().st_mtime
        clock.unlink(missing_ok=True)
        last = self._claims(part)[-1:] or [self._begun]
        with open(last[0], "rb") as file:  # network file systems ask for the time again when a file is opened
            return now_s - os.fstat(file.fileno()).st_mtime > (self._lost_after_s or 0.0)

    def _claims(self, part: Part) -> list[Path]:
        """Return the claims of a part, oldest first."""
        found = [name for name in os.listdir(self._records) if name.startswith(f"{part.name}.claim-")]
        return [self._records / name for name in sorted(found, key=lambda name: (len(name), name))]

    def _next(self, part: Part) -> Path | None:
        """Create the next claim of a part; None if another process was faster."""
        last = self._claims(part)[-1:]
        number = int(last[0].name.rpartition("-")[2]) + 1 if last else 1
        path = self._records / f"{part.name}.claim-{number}"
        try:
            with open(path, "xb"):
                return path
        except FileExistsError:
            return None

    def _renewed(self, claim: Path) -> AbstractContextManager[None]:
        return renewing(lambda: os.utime(claim), self.every_s)


@contextmanager
def renewing(renew: Callable[[], None], every_s: float) -> Iterator[None]:
    """Renew a claim in the background; where that fails, another process may write the part, too."""
    is_over = threading.Event()

    def renew_until_over() -> None:
        while not is_over.wait(every_s):
            with suppress(OSError, InputError):
                renew()

    thread = threading.Thread(target=renew_until_over, name="claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def locked_part(records: Path, out: Path, part: Part) -> Iterator[None]:
    """Lock a part for this process, by a file: network file systems do not lock folders.

    Raises:
        OutputError: another process has locked it, or the file system has no locks.
    """
    lock = records / f"{part.name}.lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = f"another process is writing part {part.number}/{part.of}"
            raise OutputError(str(out), problem, "wait for it, or stop it", code=_IN_USE) from error
        except OSError as error:
            problem, hint = f"cannot be locked: {error.strerror}", "mount the file system with flock"
            raise OutputError(str(lock), problem, hint, code="output.no-locks") from error
        yield
    finally:
        os.close(descriptor)


def is_locked_for_us(stack: ExitStack, records: Path, out: Path, part: Part) -> bool:
    """Lock a part until the stack ends; return False if another process has locked it."""
    try:
        stack.enter_context(locked_part(records, out, part))
    except OutputError as error:
        if error.code != _IN_USE:
            raise
        return False
    return True
