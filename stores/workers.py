"""Work on a sequence with several threads, each of which takes consecutive items, and how many threads to start.

Files that are elsewhere are read concurrently, with more threads: these wait for the network.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from manifests.safetensors import Header
from stores.base import InputFile, read_file_header
from stores.local import LocalFile

P = ParamSpec("P")
T = TypeVar("T")
Take = Callable[[], T | None]  # returns the thread's next item, None if none is left


def for_each(items: Iterable[T], work: Callable[[T, threading.Event], None], num_threads: int) -> None:
    """Call `work` on every item; raise the first failure, and set the event that `work` gets."""

    def run(take: Take[T], stop: threading.Event) -> None:
        while not stop.is_set() and (item := take()) is not None:
            work(item, stop)

    share_out(items, run, num_threads)


class WaitingPool(ThreadPoolExecutor):
    """A pool whose `shutdown` also waits for a thread that `submit` started and, interrupted, did not note."""

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix=thread_name_prefix)
        self._changed, self._num_running, self._is_over = threading.Condition(), 0, False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(self._run, partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            with self._changed:
                self._is_over = True
                self._changed.wait_for(lambda: not self._num_running)

    def _run(self, work: Callable[[], T]) -> T:
        with self._changed:
            if self._is_over:
                raise CancelledError
            self._num_running += 1
        try:
            return work()
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()


def share_out(
    items: Iterable[T],
    run: Callable[[Take[T], threading.Event], None],
    num_threads: int = 2,
    stop: threading.Event | None = None,
    *,
    in_order: bool = False,
) -> None:
    """Call `run` in every thread, with a function that takes items; raise the first failure, and set `stop`.

    Unless items are taken `in_order`, two threads begin at the ends of one part of the sequence, so that they meet in
    one file as late as possible: two that write one file wait for each other.
    """
    shares, stop = _Shares(items, 1 if in_order else num_threads), stop or threading.Event()
    with WaitingPool(num_threads, "worker") as pool:
        try:
            jobs = [pool.submit(run, shares.taker(0 if in_order else number), stop) for number in range(num_threads)]
            failed = wait(jobs, return_when=FIRST_EXCEPTION).done
        except BaseException:
            stop.set()
            raise
        if any(job.exception() is not None for job in failed):
            stop.set()
    errors = [error for job in (*failed, *jobs) if (error := job.exception()) is not None]
    # A thread that was stopped because of another's failure says only that.
    for error in (*(error for error in errors if not isinstance(error, CancelledError)), *errors):
        raise error


class _Shares(Generic[T]):
    """A part of the sequence for every two threads; who has finished helps where most is left."""

    def __init__(self, items: Iterable[T], num_threads: int) -> None:
        items = tuple(items)
        count = -(-num_threads // 2)
        bounds = [len(items) * number // count for number in range(count + 1)]
        self._parts = [deque(items[begin:end]) for begin, end in pairwise(bounds)]
        self._lock = threading.Lock()

    def taker(self, number: int) -> Take[T]:
        part, is_from_front = self._parts[number // 2], number % 2 == 0

        def take() -> T | None:
            with self._lock:
                part_with_most = part or max(self._parts, key=len)
                if not part_with_most:
                    return None
                return part_with_most.popleft() if is_from_front else part_with_most.pop()

        return take


_MAX_THREADS = 32  # beyond, the interpreter's lock is the limit
_CGROUPS = Path("/sys/fs/cgroup")


def threads_for_ranks(num_ranks: int = 1) -> int:
    """Return how many threads each of so many processes should start to read or write files: at least two."""
    return max(2, min(usable_cores() // num_ranks, _MAX_THREADS))


def usable_cores(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of cores that this process may use: by its affinity, and by the quotas of its cgroups."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return int(cores)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy
            folder = cgroups
        elif "cpu" in controllers.split(","):
            folder = cgroups / controllers
        else:
            continue
        below = Path(path.lstrip("/"))
        cores = min(cores, *(_quota(folder / cgroup) for cgroup in (below, *below.parents)))
    return max(1, int(cores))


def _quota(cgroup: Path) -> float:
    """Return the cores that a cgroup allows; without a limit, infinity."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota not in ("max", "-1") else float("inf")
    except (OSError, ValueError):
        return float("inf")


NUM_AT_ONCE = 16

Key = TypeVar("Key")


def each_file_header(
    files: Iterable[InputFile], heads: Mapping[InputFile, Future[bytes]] | None = None
) -> Iterator[tuple[InputFile, Header]]:
    """Yield each file and its header without storing them; files on this machine are read one at a time.

    `heads` are those of `read_head` that were read before.
    """
    read_before = heads or {}

    def read_one(file: InputFile) -> Header:
        return read_file_header(file, read_before[file].result() if file in read_before else None)

    return each_of(files, read_one)


def each_of(files: Iterable[InputFile], read_one: Callable[[InputFile], T]) -> Iterator[tuple[InputFile, T]]:
    """Yield each file and what is read of it, in order; files that are elsewhere are read concurrently."""
    files = tuple(files)
    if all(isinstance(file, LocalFile) for file in files):
        yield from ((file, read_one(file)) for file in files)
        return
    read = at_once({file: partial(read_one, file) for file in files})
    for file in files:
        if file in read:  # otherwise an earlier one failed
            yield file, read.pop(file).result()


def at_once(calls: Mapping[Key, Callable[[], T]]) -> dict[Key, Future[T]]:
    """Run calls concurrently and return their futures; after the first failure, no more are started."""
    pool = ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="header")
    try:
        made = {key: pool.submit(call) for key, call in calls.items()}
        wait(made.values(), return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    return {key: call for key, call in made.items() if not call.cancelled()}
