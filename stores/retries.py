"""Retries of what may succeed later, with a growing backoff, for minutes."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TypeVar

from manifests.errors import UnreachableError

__all__ = ["PassingError", "Retries", "backoff_s", "keep_trying"]

logger = logging.getLogger(__name__)
_NOTICED_S = 2.0  # whoever watches wonders at a wait from here on
_DAY_S = 86400.0
_PROGRESS_NBYTES = 64 << 10  # that came since the last failure, and so the wait was worth it

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How long to try, and when an answer is too slow to count as one."""

    num_attempts: int = 100
    patience_s: float = 300.0  # from the first failure to the last attempt
    first_wait_s: float = 0.5
    longest_backoff_s: float = 30.0
    longest_wait_s: float = 300.0  # a server that asks for more is not waited for
    window_s: float = 30.0  # over which a server must send as fast as `stores.pace` says
    answer_s: float = 60.0  # from a request to the head of its answer


class PassingError(Exception):
    """Something that may be gone at the next attempt. `asked_s` is how long the server asks to wait."""

    def __init__(
        self, problem: str, hint: str = "", asked_s: float | None = None, *, code: str = "store.unreachable"
    ) -> None:
        super().__init__(problem)
        self.problem, self.hint, self.asked_s, self.code = problem, hint, asked_s, code

    @property
    def is_busy(self) -> bool:
        """Whether the server would be helped by fewer requests."""
        return self.code == "store.busy"


def backoff_s(attempt: int, retries: Retries) -> float:
    """Draw the wait after an attempt (from 1): below a bound that doubles each time, "full jitter" as AWS calls it.

    Source: Exponential Backoff And Jitter, AWS Architecture Blog, 2015.
    """
    return random.uniform(0, min(retries.first_wait_s * 2 ** min(attempt - 1, 32), retries.longest_backoff_s))


def keep_trying(
    step: Callable[[], Result],
    where: str,
    retries: Retries,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
    nbytes_done: Callable[[], int] = lambda: 0,
) -> Result:
    """Return what `step` returns, once it does so without a PassingError.

    Attempts and patience begin again where `nbytes_done` says that more of the answer has come.

    Raises:
        UnreachableError: the attempts or the patience are used up, or the server asks to wait too long.
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
                asked = f"{error.asked_s:.0f} s" if error.asked_s <= _DAY_S else "more than a day"
                raise _given_up(where, error, f", and asks for a wait of {asked}") from error
            wait_s = (error.asked_s or 0.0) + backoff_s(attempt, retries)
            if attempt == retries.num_attempts or clock() + wait_s > give_up_at:
                raise _given_up(where, error, f" (attempt {attempt}, the last)") from error
            problem = error.problem
        level = logging.WARNING if wait_s >= _NOTICED_S else logging.DEBUG
        logger.log(level, "%s: %s; trying again in %.1f s", where, problem, wait_s)
        attempt += 1
        if stop.wait(wait_s):
            raise CancelledError


def _given_up(where: str, error: PassingError, how: str) -> UnreachableError:
    return UnreachableError(where, error.problem + how, error.hint, code=error.code)
