"""Seconds of a rank's start, and of steps: data, compute, communication and bubble of every pipeline rank. No torch.

# Note [Bubble and communication]
A rank that waits for another cannot know whether that one still computes or its message is in transit, and clocks of
machines differ by more than a message takes. So each rank measures what it can by itself: when it began, counted from
the end of the previous step's exchange, which all ranks leave together; how long its stages compute for a microbatch;
when its schedule ended, and when its gradients were reduced. Simulating the schedule with those times and with free
transfers yields the earliest time at which each rank could have ended. Any time beyond that is communication; the rest
of a rank's waiting is the bubble: waits for ranks that read data, compute, or start late themselves.

A large schedule is simulated by this module as a process of its own, since no rank can begin a step before rank 0.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import get_args

from manifests.schedules.actions import Table, TracedKind
from manifests.schedules.simulation import StageCosts, simulate
from runner.rundir.exit_report import AGENT

logger = logging.getLogger("runner")

DATA = 1  # where a rank's numbers have the seconds in which it waited for data
KINDS: tuple[TracedKind, ...] = get_args(TracedKind)
PARTS = ("launch_s", "meet_s", "manifest_s", "build_s", "self_check_s", "fill_s")  # of a rank's start


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Seconds of one pipeline rank, in four parts, from the start of a step until its gradient norm is known."""

    data_s: float  # waiting for its batch
    compute_s: float  # forwards, losses and backwards
    communication_s: float
    bubble_s: float


class StartTimes:
    """Seconds of the parts of a rank's start, by name, in order; those that come again are summed.

    The first begins when the agent was started.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = time.monotonic() - _age_s(os.environ.get(AGENT, "self"))

    def end(self, part: str) -> None:
        """End a part of the start, and begin the next."""
        now_s = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._since_s
        self._since_s = now_s


def split_step(table: Table, rows: Sequence[Sequence[float]], window_s: float) -> tuple[RankTimes, ...]:
    """Split a step into parts, from each rank's numbers and the seconds between this exchange and the last.

    See Note [Bubble and communication].
    """
    measured = [_Measured.of(row) for row in rows]
    by_stage = {
        stage: means
        for rank, times in enumerate(measured)
        for stage, means in zip(table.placement.stages_on(rank), times.stages, strict=True)
    }
    costs = stage_costs(*zip(*(by_stage[stage] for stage in sorted(by_stage)), strict=True))
    timeline = simulate(table, costs, [times.begin_s for times in measured])
    ends_s = [spans[-1].end_s for spans in timeline.ranks]
    return tuple(_parts(times, end_s, window_s) for times, end_s in zip(measured, ends_s, strict=True))


class SplitProcess:
    """Splits steps of one schedule in another process, which begins with the first of them and ends with this one."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._thread = threading.Thread(target=self._serve, name="step times", daemon=True)
        self._requests: SimpleQueue[tuple[Sequence[Sequence[float]], float]] = SimpleQueue()
        self._results: SimpleQueue[tuple[RankTimes, ...]] = SimpleQueue()

    def submit(self, rows: Sequence[Sequence[float]], window_s: float) -> None:
        if self._thread.ident is None:
            self._thread.start()
        if self._thread.is_alive():  # nobody takes steps once the process has failed
            self._requests.put((rows, window_s))

    def take(self) -> tuple[RankTimes, ...]:
        """Return the parts of the earliest step that is split and was not taken; empty if there is none."""
        with suppress(Empty):
            return self._results.get_nowait()
        return ()

    def _serve(self) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        try:
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump(self._table, process.stdin)
                while True:
                    pickle.dump(self._requests.get(), process.stdin)
                    process.stdin.flush()
                    self._results.put(tuple(RankTimes(**parts) for parts in pickle.load(process.stdout)))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            logger.warning("note: the run continues without the breakdown of its step times: %s", error)


def stage_costs(
    forward: Sequence[float],
    backward: Sequence[float],
    inputs: Sequence[float],
    weights: Sequence[float],
    loss: Sequence[float],
) -> StageCosts:
    """Return the cost of each stage's actions from measured times; 0 means that no such action ran."""
    # A stage has full backwards, split ones, or both; where only full ones ran, each part counts as half.
    halves = [(i, w) if i or w else (b / 2, b / 2) for b, i, w in zip(backward, inputs, weights, strict=True)]
    return StageCosts(
        forward_s=tuple(f + extra for f, extra in zip(forward, loss, strict=True)),
        input_s=tuple(i for i, _ in halves),
        weight_s=tuple(w for _, w in halves),
        whole_s=tuple(b or i + w for b, (i, w) in zip(backward, halves, strict=True)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """What a rank measures of a step, in seconds."""

    begin_s: float  # start of its schedule, from the end of the last exchange
    data_s: float
    compute_s: float
    schedule_s: float
    reduce_s: float  # from the schedule's end until its gradients were reduced and squared
    stages: tuple[tuple[float, ...], ...]  # for each of its stages, by `KINDS`: the mean time of an action

    @classmethod
    def of(cls, row: Sequence[float]) -> _Measured:
        begin_s, data_s, compute_s, schedule_s, reduce_s, *means = row
        stages = tuple(tuple(means[at : at + len(KINDS)]) for at in range(0, len(means), len(KINDS)))
        return cls(
            begin_s=begin_s,
            data_s=data_s,
            compute_s=compute_s,
            schedule_s=schedule_s,
            reduce_s=reduce_s,
            stages=stages,
        )


def _parts(measured: _Measured, end_s: float, window_s: float) -> RankTimes:
    waited_s = max(0.0, window_s - measured.begin_s - measured.compute_s)
    late_s = max(0.0, measured.begin_s + measured.schedule_s - end_s)
    communication_s = min(waited_s, late_s + measured.reduce_s)
    return RankTimes(
        data_s=measured.data_s,
        compute_s=measured.compute_s,
        communication_s=communication_s,
        bubble_s=waited_s - communication_s,
    )


def _age_s(pid: str) -> float:
    """Return how long ago a process was started; `runner launch` becomes the agent, and keeps its process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):  # not Linux
        return 0.0


def main() -> None:
    """Split the steps that come from standard input, which begins with their table, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks handle it
    table, results = pickle.load(sys.stdin.buffer), sys.stdout.buffer
    with suppress(EOFError, BrokenPipeError):
        while True:
            rows, window_s = pickle.load(sys.stdin.buffer)
            pickle.dump([asdict(parts) for parts in split_step(table, rows, window_s)], results)
            results.flush()


if __name__ == "__main__":
    main()
