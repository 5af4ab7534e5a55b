"""How many concurrent requests a connection is worth: found by trying."""

from __future__ import annotations

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
