"""Seconds of the parts of a rank's start, from the launch of the command on. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from runner.rundir.exit_report import AGENT

PARTS = ("launch_s", "meet_s", "manifest_s", "build_s", "self_check_s", "fill_s")


class StartTimes:
    """The parts by name, in order; those that come again are summed. The first begins when the agent was started."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = time.monotonic() - _age_s(os.environ.get(AGENT, "self"))

    def end(self, part: str) -> None:
        """End a part of the start, and begin the next."""
        now_s = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._since_s
        self._since_s = now_s


def _age_s(pid: str) -> float:
    """Return how long ago a process was started; `runner launch` becomes the agent, and keeps its process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):  # not Linux
        return 0.0
