"""Retries with exponential backoff, the detection of slow responses, and how many requests run at a time."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
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
        """Count received bytes."""
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


FIRST_LIMIT = 16
_LONG_NBYTES = 1 << 20  # of a response whose speed counts
_FAST_BYTES_PER_S = 4 << 20
_LOOK_UP_S = 0.2  # polling interval for cancellation


class Streams:
    """A limit on concurrent requests to one server, by all threads.

    It grows while requests wait for it and that raises the throughput; `fixed`, it does not. A "busy" response halves
    it; from then on, as many good responses raise it by one. `is_fast`: the last long response took no longer than one
    that need not be watched, or resumed where it breaks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = threading.Condition()
        self._clock = clock
        self._num_running = self._num_waiting = 0
        self._growth = Growth(FIRST_LIMIT)
        self._was_busy = self._is_fixed = self.is_fast = False

    @property
    def limit(self) -> float:
        """How many requests may run concurrently now."""
        return self._growth.limit

    def fix(self, limit: int) -> None:
        """Set the limit, which will not grow."""
        with self._free:
            self._growth, self._is_fixed = Growth(limit), True
            self._free.notify_all()

    @contextmanager
    def slot(self, stop: threading.Event) -> Iterator[Stream]:
        """Run a block as one of the streams, once the limit allows."""
        self._begin(stop)
        stream = Stream(self, self._clock)
        try:
            yield stream
        except PassingError as error:
            self.is_fast = False
            if error.is_busy:
                self._slow_down()
            raise
        else:
            if stream.nbytes >= _LONG_NBYTES:
                self.is_fast = stream.nbytes > _FAST_BYTES_PER_S * (self._clock() - stream.begun_s)
            self._speed_up()
        finally:
            with self._free:
                self._num_running -= 1
                self._free.notify()

    def arrived(self, nbytes: int, answer_s: float) -> None:
        """Count bytes of any stream; `answer_s` is the response time, passed once for each."""
        with self._free:
            before, is_wanted = self.limit, self._num_waiting > 0 and not self._is_fixed
            self._growth.arrived(self._clock(), nbytes, answer_s, is_wanted=is_wanted)
            if self.limit > before:
                self._free.notify_all()

    def _begin(self, stop: threading.Event) -> None:
        with self._free:
            self._num_waiting += 1
            try:
                while self._num_running + 1 > self.limit:
                    if stop.is_set():
                        raise CancelledError
                    self._free.wait(_LOOK_UP_S)
            finally:
                self._num_waiting -= 1
            self._num_running += 1

    def _slow_down(self) -> None:
        with self._free:
            self._was_busy = True
            self._growth.stop(self._clock(), max(1.0, min(self.limit, self._num_running) // 2))

    def _speed_up(self) -> None:
        with self._free:
            if self._was_busy:
                self._growth.limit += 1 / self.limit
                self._free.notify()


class Stream:
    """One response, whose bytes are counted as they arrive."""

    def __init__(self, streams: Streams, clock: Callable[[], float]) -> None:
        self._streams, self._clock = streams, clock
        self.begun_s, self.nbytes, self._has_begun = clock(), 0, False

    def take(self, nbytes: int) -> None:
        answer_s = 0.0 if self._has_begun else self._clock() - self.begun_s
        self.nbytes, self._has_begun = self.nbytes + nbytes, True
        self._streams.arrived(nbytes, answer_s)


PAUSE_S = 30.0  # before a limit that did not help, or that a server refused, is tried again
_SHORTEST_WINDOW_S = 0.1
_FACTOR = 4
_LEAST_GAIN = 1.3  # of the throughput, from so many times the requests
_NUM_TRIES = 3  # windows without that gain before the limit goes back


class Growth:
    """A limit on concurrent requests, multiplied as long as that raises the throughput.

    The throughput is measured over windows of two response times or more. The first one after a change is not used.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._best, self._failures = 0.0, 0  # bytes per second at the limit before; windows that were not faster
        self._begun_s: float | None = None
        self._nbytes, self._answer_s = 0, 0.0
        self._is_settling, self._pause_until_s = False, float("-inf")

    def arrived(self, now_s: float, nbytes: int, answer_s: float = 0.0, *, is_wanted: bool = True) -> None:
        """Count bytes, of which the first took `answer_s`; raise the limit if it is wanted and worth it."""
        self._answer_s = max(self._answer_s * 0.9, answer_s) if answer_s else self._answer_s
        if not is_wanted or now_s < self._pause_until_s:
            self._begun_s = None
            return
        if self._begun_s is None:
            self._begun_s, self._nbytes = now_s, 0
            return
        self._nbytes += nbytes
        passed_s = now_s - self._begun_s
        if passed_s < max(_SHORTEST_WINDOW_S, 2 * self._answer_s):
            return
        rate, self._begun_s, self._nbytes = self._nbytes / passed_s, now_s, 0
        if self._is_settling:
            self._is_settling = False
        elif rate >= _LEAST_GAIN * self._best:
            self._best, self._failures, self._is_settling = rate, 0, True
            self.limit *= _FACTOR
        else:
            self._failures += 1
            if self._failures == _NUM_TRIES:
                self.stop(now_s, self.limit / _FACTOR)

    def stop(self, now_s: float, limit: float) -> None:
        """Keep this limit for a while."""
        self.limit, self._best, self._failures = limit, 0.0, 0
        self._begun_s, self._is_settling, self._pause_until_s = None, False, now_s + PAUSE_S
