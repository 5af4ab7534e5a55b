"""What may pass by itself is tried again, less and less often, a bounded number of times."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TypeVar

from manifests.errors import UnreachableError

__all__ = ["PassingError", "Retries", "keep_trying"]

logger = logging.getLogger(__name__)
_NOTICED_S = 2.0  # whoever watches wonders at a wait from here on

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often to try, and how long to wait between: doubled each time, up to half of it left off at random."""

    num_attempts: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 300.0  # a server that asks for more is not waited for


class PassingError(Exception):
    """Something that may be gone at the next attempt. `asked_s` is how long the server asks to wait."""

    def __init__(self, problem: str, hint: str = "", asked_s: float | None = None) -> None:
        super().__init__(problem)
        self.problem, self.hint, self.asked_s = problem, hint, asked_s


def keep_trying(step: Callable[[], Result], where: str, retries: Retries, stop: threading.Event) -> Result:
    """Give what `step` gives, once it does so without a PassingError.

    Raises:
        UnreachableError: the attempts are used up, or the server asks to wait too long.
        CancelledError: `stop` was set while waiting.
    """
    attempt = 1
    while True:
        try:
            return step()
        except PassingError as error:
            if error.asked_s is not None and error.asked_s > retries.longest_wait_s:
                raise UnreachableError(
                    where, f"{error.problem}, and asks for a wait of {error.asked_s:.0f} s", error.hint
                ) from error
            if attempt == retries.num_attempts:
                raise UnreachableError(where, f"{error.problem} (attempt {attempt}, the last)", error.hint) from error
            problem, wait_s = error.problem, error.asked_s or 0.0
            wait_s += min(retries.first_wait_s * 2 ** (attempt - 1), retries.longest_wait_s) * random.uniform(0.5, 1)
        level = logging.WARNING if wait_s >= _NOTICED_S else logging.DEBUG
        logger.log(level, "%s: %s; trying again in %.1f s", where, problem, wait_s)
        attempt += 1
        if stop.wait(wait_s):
            raise CancelledError
