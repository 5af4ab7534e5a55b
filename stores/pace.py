"""Answers that come, but too slowly to be waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stores.retries import PassingError

__all__ = ["LEAST_BYTES_PER_S", "Pace", "answered_within"]

LEAST_BYTES_PER_S = 4 << 10  # of one connection; what is slower makes no progress worth the name
_HINT = "check the network; a proxy or the server may be overloaded"

Answer = TypeVar("Answer")


class Pace:
    """Watches the bytes of one answer: over each window, they must come at `LEAST_BYTES_PER_S`."""

    def __init__(self, server: str, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._window_s, self._clock = server, window_s, clock
        self._begun, self._nbytes = clock(), 0

    def take(self, nbytes: int) -> None:
        """Count bytes that have come.

        Raises:
            PassingError: too few have, in a whole window.
        """
        self._nbytes += nbytes
        passed_s = self._clock() - self._begun
        if passed_s < self._window_s:
            return
        if self._nbytes < LEAST_BYTES_PER_S * passed_s:
            problem = f"{self._server} sent {self._nbytes} bytes in {passed_s:.0f} s"
            raise PassingError(problem, _HINT, code="store.too-slow")
        self._begun, self._nbytes = self._clock(), 0


def answered_within(
    limit_s: float, server: str, call: Callable[[], Answer], abandon: Callable[[], object] = lambda: None
) -> Answer:
    """Return what `call` returns, if it does so in time; later, `abandon` is called after it.

    A client's own timeouts are for single reads, so that an answer of one byte now and then never ends. The call
    runs in a thread of its own, which is left to itself when it takes too long.

    Raises:
        PassingError: it takes too long.
    """
    answer: Future[Answer] = Future()
    lock, is_late = threading.Lock(), False

    def run() -> None:
        try:
            found = call()
        except BaseException as error:
            answer.set_exception(error)
            return
        with lock:
            if not is_late:
                answer.set_result(found)
                return
        abandon()

    threading.Thread(target=run, name="answer", daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        with lock:
            if answer.done():  # it came, or failed, just now; or it is a timeout of its own
                return answer.result()
            is_late = True
    raise PassingError(f"{server} has not answered in {limit_s:.0f} s", _HINT, code="store.too-slow")
