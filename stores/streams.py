"""Adaptive limit on concurrent requests to a server: fewer if it is busy, then gradually more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from stores.retries import PassingError

__all__ = ["Streams"]

_LOOK_UP_S = 0.2  # polling interval for cancellation


class Streams:
    """A concurrency limit that is halved by each "busy" response and raised by one after as many good ones.

    While a server keeps up, there is no limit.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._num_running = 0
        self._limit = float("inf")

    @property
    def limit(self) -> float:
        """How many requests may run concurrently now."""
        return self._limit

    @contextmanager
    def one(self, stop: threading.Event) -> Iterator[None]:
        """Run a block as one of the streams, once the limit allows.

        Raises:
            CancelledError: `stop` was set while waiting.
        """
        with self._free:
            while self._num_running + 1 > self._limit:
                if stop.is_set():
                    raise CancelledError
                self._free.wait(_LOOK_UP_S)
            self._num_running += 1
        try:
            yield
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

    def _slow_down(self) -> None:
        with self._free:
            self._limit = max(1.0, min(self._limit, self._num_running) // 2)

    def _speed_up(self) -> None:
        with self._free:
            self._limit += 1 / self._limit
            self._free.notify()
