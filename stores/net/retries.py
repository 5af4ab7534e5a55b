"""Retries with exponential backoff, and the detection of responses that are too slow to wait for."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TypeVar

from manifests.errors import UnreachableError

logger = logging.getLogger(__name__)
_NOTICED_S = 2.0  # longer waits are logged as warnings
_DAY_S = 86400.0
_PROGRESS_NBYTES = 64 << 10  # received since the last failure: resets the retries

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How long to retry, and when a response is too slow."""

    num_attempts: int = 100
    patience_s: float = 300.0  # from the first failure to the last attempt
    first_wait_s: float = 0.5
    longest_backoff_s: float = 30.0
    longest_wait_s: float = 300.0  # gives up if a server asks for a longer wait
    window_s: float = 30.0  # of the minimum speed in `Pace`
    answer_s: float = 60.0  # from a request to the headers of its response
    request_s: float = 120.0  # of a bucket, whose client tells of no progress between its chunks; then resumed
    idle_s: float = 300.0  # of an upload, without a byte sent or received: a large commit takes minutes


class PassingError(Exception):
    """A transient failure. `asked_s` is the wait that the server requests."""

    def __init__(
        self, problem: str, hint: str = "", asked_s: float | None = None, *, code: str = "store.unreachable"
    ) -> None:
        super().__init__(problem)
        self.problem, self.hint, self.asked_s, self.code = problem, hint, asked_s, code

    @property
    def is_busy(self) -> bool:
        """Whether the server is overloaded, so that fewer requests help."""
        return self.code == "store.busy"


def backoff_s(attempt: int, retries: Retries) -> float:
    """Draw the wait after an attempt (from 1): exponential backoff with full jitter.

    Source: Exponential Backoff And Jitter, AWS Architecture Blog, 2015.
    """
    return random.uniform(0, min(retries.first_wait_s * 2 ** min(attempt - 1, 32), retries.longest_backoff_s))


def keep_trying(
    step: Callable[[], T],
    where: str,
    retries: Retries,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
    nbytes_done: Callable[[], int] = lambda: 0,
) -> T:
    """Call `step` until it returns without a PassingError.

    Progress of `nbytes_done` resets the attempts and the timeout.

    Raises:
        UnreachableError: the attempts or the time are used up, or the server requests too long a wait.
        CancelledError: `stop` was set while waiting.
    """
    attempt, give_up_at, nbytes = 1, None, nbytes_done()
    while True:
        try:
            return step()
        except PassingError as error:
            if nbytes_done() - nbytes >= _PROGRESS_NBYTES:
                attempt, give_up_at, nbytes = 1, None, nbytes_done()
            if give_up_at is None:
                give_up_at = clock() + retries.patience_s
            if error.asked_s is not None and error.asked_s > retries.longest_wait_s:
                wait = f"{error.asked_s:.0f} s" if error.asked_s <= _DAY_S else "more than a day"
                raise _given_up(where, error, f" and requests a wait of {wait}") from error
            wait_s = (error.asked_s or 0.0) + backoff_s(attempt, retries)
            if attempt == retries.num_attempts or clock() + wait_s > give_up_at:
                raise _given_up(where, error, f" (gave up after attempt {attempt})") from error
            problem = error.problem
        level = logging.WARNING if wait_s >= _NOTICED_S else logging.DEBUG
        logger.log(level, "%s: %s; retrying in %.1f s", where, problem, wait_s)
        attempt += 1
        if stop.wait(wait_s):
            raise CancelledError


def _given_up(where: str, error: PassingError, how: str) -> UnreachableError:
    return UnreachableError(where, error.problem + how, error.hint, code=error.code)


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
            response = call()
        except BaseException as error:
            answer.set_exception(error)
            return
        with lock:
            if not is_late:
                answer.set_result(response)
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
