"""Work on checkpoints in a thread beside training: one piece at a time, with a report of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from manifests.errors import UserError
from runner.distributed.fail_together import OneRankError


class _Report(Protocol):
    @property
    def failure(self) -> UserError | None: ...


ReportT = TypeVar("ReportT", bound=_Report)


class InFlight(Generic[ReportT]):
    """A thread, what runs in it, and the reports of what has ended.

    Every rank creates one, begins the same work, and uses it as a context manager. Leaving the context waits for the
    work in flight, unless a rank is lost.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._running: Future[ReportT] | None = None
        self._is_awaited = threading.Event()
        self._reports: list[ReportT] = []
        self.failure: UserError | None = None  # of the newest that has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        all_know = error is None or (isinstance(error, UserError) and not isinstance(error, OneRankError))
        self._is_awaited.set()
        self._pool.shutdown(wait=all_know)

    def reports(self, *, wait: bool = False) -> tuple[ReportT, ...]:
        """Return what has ended since the last call; with `wait`, also what is in flight."""
        if wait or (self._running is not None and self._running.done()):
            self._wait()
        ended, self._reports = tuple(self._reports), []
        return ended

    def _begin(self, work: Callable[..., ReportT], *args: Any) -> None:
        assert self._running is None, "the work before has ended"
        self._running = self._pool.submit(work, *args)

    def _wait(self) -> None:
        if self._running is not None:
            self._is_awaited.set()
            ended, self._running = self._running.result(), None
            self._is_awaited.clear()
            self._reports.append(ended)
            self.failure = ended.failure
