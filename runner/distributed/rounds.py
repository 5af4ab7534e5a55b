"""Long work on every rank, with regular exchanges so that no rank times out, or beside training, to which it yields."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from manifests.errors import UnreachableError
from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks
from runner.distributed.watchdog import StallTimer
from runner.distributed.world import same_gpu

T = TypeVar("T")
_ROUND_S = 2.0
_POLL_S = 0.2
_SLICE_S = 0.002  # of processor time, between two looks at the cores
_SHARE = 0.05  # of a core, while they are busy
_LONGEST_PAUSE_S = 0.5


def in_rounds(
    task: str,
    work: Callable[[threading.Event], T],
    group: dist.ProcessGroup | None = None,
    timer: StallTimer | None = None,
) -> T:
    """Run work that may take longer than the timeout between ranks on every rank of a group, and fail together.

    `work` runs in a thread while ranks exchange their progress. It must run no collectives of this group, and of others
    only those that their ranks enter in the same call. Once its event is set, because another rank has failed, it
    should end early. When this returns or raises, it has ended on all ranks, unless it is stalled by its `timer`, to
    which it beats.

    Raises:
        UserError: as `raise_on_all_ranks`, on all ranks, for the first failure.
        UnreachableError: the work is stalled: its thread never ends, and only the process can.
    """
    stop, is_stalled = threading.Event(), False
    failure: Exception | None = None
    pool = ThreadPoolExecutor(1, thread_name_prefix=task, initializer=same_gpu())
    working = pool.submit(work, stop)
    try:
        is_done = False
        while not is_done:
            wait((working,), timeout=_ROUND_S)
            is_stalled = timer is not None and timer.is_stalled and not working.done()
            try:
                is_done = is_true_for_all(is_stalled or working.done(), group)
            except Exception:  # another rank has ended; all know why
                if failure is None:
                    raise
                break
            if failure is None:
                failure = _failure_of(working, task, group, is_stalled=is_stalled)
            if failure is not None:
                stop.set()
    finally:
        stop.set()
        pool.shutdown(wait=not is_stalled)
    if failure is not None:
        raise failure
    return working.result()


def result_of(running: Future[T], stop: threading.Event) -> T:
    """Return the result of what another thread runs; do not wait for it once the event is set."""
    while not (running.done() or stop.is_set()):
        wait((running,), timeout=_POLL_S)
    if not running.done():
        raise CancelledError
    return running.result()


def is_true_for_all(value: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `value` is true on all ranks of a group; each of them calls this."""
    return all(from_all_ranks(value, group))


def _failure_of(
    working: Future[T], task: str, group: dist.ProcessGroup | None, *, is_stalled: bool
) -> Exception | None:
    """Return the failure of any rank so far; on a rank with a bug, that bug."""
    try:
        with raise_on_all_ranks(task, group):
            if is_stalled:
                problem = "made no progress for --timeout seconds: a disk, mount or store does not answer"
                hint = "check the disks and mounts of this rank's node; raise --timeout if they are only slow"
                raise UnreachableError(task, problem, hint, code="store.stalled")
            if working.done():
                working.result()
    except Exception as error:
        return error
    return None


def run_beside_training(
    steps: Generator[None, None, T],
    is_awaited: Callable[[], bool] = lambda: False,
    are_cores_busy: Callable[[], bool] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Run a generator to its end: while cores are busy, in a twentieth of one, until it is awaited.

    # Note [Yielding without priorities]
    A thread of low priority that has the interpreter's lock keeps training from it until the scheduler lets it
    continue, and one that runs on idle cores alone may never end. So this thread has the priority of training and
    pauses: after a few milliseconds of work it looks whether more threads can run than there are cores, or whether it
    waited for one. A step should be short: the pause comes after it.
    """
    are_cores_busy, used_s = are_cores_busy or _Contention().is_there, 0.0
    while True:
        begun_s = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        used_s += time.thread_time() - begun_s
        if used_s >= _SLICE_S:
            if not is_awaited() and are_cores_busy():
                pause(min(used_s * (1 / _SHARE - 1), _LONGEST_PAUSE_S))
            used_s = 0.0


class _Contention:
    """Whether the calling thread, or another of this machine, waits for a core, as far as Linux says it."""

    def __init__(self) -> None:
        self._waited_ns = _waited_ns()

    def is_there(self) -> bool:
        before_ns, self._waited_ns = self._waited_ns, _waited_ns()
        return self._waited_ns - before_ns > _SLICE_S * 1e9 or _num_running() > (os.cpu_count() or 1)


def _waited_ns() -> int:
    """Return how long the calling thread has been ready to run, and did not."""
    return int((_read_proc("thread-self/schedstat") or "0 0").split()[1])


def _num_running() -> int:
    return int((_read_proc("loadavg") or "0 0 0 0/0").split()[3].partition("/")[0])


def _read_proc(name: str) -> str:
    try:
        return Path("/proc", name).read_text()
    except OSError:
        return ""
