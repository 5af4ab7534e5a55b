"""Detection of responses that are too slow to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stores.net.retries import PassingError

LEAST_BYTES_PER_S = 4 << 10  # of one connection; slower ones count as stalled
_HINT = "check the network; a proxy or the server may be overloaded"

Answer = TypeVar("Answer")


class Pace:
    """Watches one response: over each window, it must arrive at `LEAST_BYTES_PER_S` or faster."""

    def __init__(self, server: str, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._window_s, self._clock = server, window_s, clock
        self._begun, self._nbytes = clock(), 0

    def take(self, nbytes: int) -> None:
        """Count received bytes.

        Raises:
            PassingError: too few arrived in a whole window.
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
    """Return the result of `call` if it returns in time; if it returns later, `abandon` is called.

    A client's timeouts apply to single reads, so a response of one byte now and then never times out. The call runs
    in a thread, which is left running on a timeout.

    Raises:
        PassingError: timeout.
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
            if answer.done():  # it arrived or failed just now, or the call itself raised TimeoutError
                return answer.result()
            is_late = True
    raise PassingError(f"no response from {server} within {limit_s:.0f} s", _HINT, code="store.too-slow")
