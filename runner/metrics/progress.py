"""Show the progress of a run: lines, and below them a bar on a terminal."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from typing import NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger("runner.progress")
_noted = logging.getLogger("runner")


class StepProgress:
    """Shows the steps after `first_step`: every `every`-th of them and the last, and on a terminal a bar below.

    With `quiet` nothing is shown; the log of rank 0 has it nevertheless.
    """

    def __init__(self, num_steps: int, *, first_step: int = 0, every: int = 1, quiet: bool = False) -> None:
        self.num_steps, self._every, self._quiet = num_steps, every, quiet
        self._bar: tqdm[NoReturn] | None = None
        self._redirected = ExitStack()
        if sys.stdout.isatty() and _has_columns() and not quiet:
            self._bar = tqdm(
                total=num_steps, initial=first_step, unit="step", file=sys.stderr, dynamic_ncols=True, smoothing=0.1
            )
            self._redirected.enter_context(logging_redirect_tqdm())  # else notes end up on the bar's line

    def step(self, step: int, brief: str, line: str) -> None:
        """Show that a step was taken: `brief` beside the bar, and `line`."""
        logger.debug("%s", line)
        if self._bar is not None:
            self._bar.set_postfix_str(brief, refresh=False)
            self._bar.update(step - self._bar.n)
        if step % self._every == 0 or step == self.num_steps:
            self._print(line)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        logger.debug("%s", line)
        self._print(line)

    def _print(self, line: str) -> None:
        if self._quiet:
            return
        try:
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line, file=sys.stdout, flush=True)
        except OSError as error:  # a full disk, or a closed pipe, must not stop training
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
            problem = error.strerror or type(error).__name__
            _noted.warning("note: standard output: %s; the run continues, and its log has the steps", problem)

    def close(self) -> None:
        self._redirected.close()
        if self._bar is not None:
            self._bar.close()


def _has_columns() -> bool:
    """Whether standard error is a terminal with a width; some say 0, where a bar has no room."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
