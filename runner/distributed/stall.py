"""How long something that works in a thread has stood still: a disk that does not answer never raises. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Pulse"]


class Pulse:
    """Told by whoever works that it gets on, and asked by another thread."""

    def __init__(self) -> None:
        self._last_s: float | None = None  # None: nothing is worked on

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count from here on, while the block runs."""
        self.beat()
        try:
            yield
        finally:
            self._last_s = None

    def beat(self) -> None:
        """Tell that it got on."""
        self._last_s = time.monotonic()

    @property
    def still_s(self) -> float:
        """Seconds since it last got on; 0 where nothing is worked on."""
        last_s = self._last_s
        return 0.0 if last_s is None else time.monotonic() - last_s
