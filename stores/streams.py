"""How many requests a server is sent at a time: fewer once it is busy, then one more after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from stores.retries import PassingError

__all__ = ["Streams"]

_LOOK_UP_S = 0.2  # how soon a waiting request notices that nobody wants it any more


class Streams:
    """A number of streams that adapts: halved by each busy answer, one more after as many good ones.

    There is no bound but the caller's own while a server keeps up.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._num_running = 0
        self._limit = float("inf")

    @property
    def limit(self) -> float:
        """How many requests may run at a time now."""
        return self._limit

    @contextmanager
    def one(self, stop: threading.Event) -> Iterator[None]:
        """Run a block as one of the streams, once there is room for it.

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
