"""Long work on every rank, with regular exchanges, so that no rank waits for another until it times out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch.distributed as dist

from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks

T = TypeVar("T")
_ROUND_S = 2.0


def in_rounds(task: str, work: Callable[[threading.Event], T], group: dist.ProcessGroup | None = None) -> T:
    """Run work that may take longer than the timeout between ranks on every rank of a group, and fail together.

    `work` runs in a thread while ranks exchange their progress, and must not run collectives. Once its event is set,
    because another rank has failed, it should end early. When this returns or raises, it has ended on all ranks.

    Raises:
        UserError: as `raise_on_all_ranks`, on all ranks, for the first failure.
    """
    stop = threading.Event()
    failure: Exception | None = None
    with ThreadPoolExecutor(1, thread_name_prefix=task) as pool:
        working = pool.submit(work, stop)
        try:
            is_done = False
            while not is_done:
                wait((working,), timeout=_ROUND_S)
                is_done = is_true_for_all(working.done(), group)
                if failure is None:
                    failure = _failure_of(working, task, group)
                if failure is not None:
                    stop.set()
        finally:
            stop.set()
    if failure is not None:
        raise failure
    return working.result()


def is_true_for_all(value: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `value` is true on all ranks of a group; each of them calls this."""
    return all(from_all_ranks(value, group))


def _failure_of(working: Future[T], task: str, group: dist.ProcessGroup | None) -> Exception | None:
    """Return the failure of any rank so far; on a rank with a bug, that bug."""
    try:
        with raise_on_all_ranks(task, group):
            if working.done():
                working.result()
    except Exception as error:
        return error
    return None
