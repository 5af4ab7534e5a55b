"""Adaptive limit on concurrent requests to a server: more while that is faster, fewer if it is busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from stores.net.retries import PassingError

FIRST_LIMIT = 16
_LOOK_UP_S = 0.2  # polling interval for cancellation


class Streams:
    """A limit on concurrent requests to one server, by all threads.

    It grows while requests wait for it and that raises the throughput; `fixed`, it does not. A "busy" response halves
    it; from then on, as many good responses raise it by one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = threading.Condition()
        self._clock = clock
        self._num_running = self._num_waiting = 0
        self._growth = Growth(FIRST_LIMIT)
        self._was_busy = self._is_fixed = False

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
        """Run a block as one of the streams, once the limit allows.

        Raises:
            CancelledError: `stop` was set while waiting.
        """
        self._begin(stop)
        try:
            yield Stream(self, self._clock)
        except PassingError as error:
            if error.is_busy:
                self._slow_down()
            raise
        else:
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
        self._asked_s: float | None = clock()

    def take(self, nbytes: int) -> None:
        """Count received bytes."""
        answer_s = 0.0 if self._asked_s is None else self._clock() - self._asked_s
        self._asked_s = None
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
