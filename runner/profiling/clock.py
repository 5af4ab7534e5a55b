"""The step time breakdown: what a rank measures of its step, and the parts computed from all ranks' measurements."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from manifests.schedules import Table, actions_of
from runner.profiling.step_times import KINDS, RankTimes, measured_times, split_step
from runner.profiling.trace import Recorder

_SIMULATED_S = 3.1e-6  # of an action, at most: 2.0 to 2.6 us were measured on a core, with 4,096 and 131,072 actions
_MOST_S = 1e-3


class Clock:
    """Measures a rank's step, and splits the steps of all ranks into parts; `table` has their actions."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self._stages = table, table.placement.stages_on(rank)
        self._data_s, self._exchanged_s = 0.0, 0.0
        self._window_s = 0.0  # between the last two exchanges
        self._rows: Sequence[Sequence[float]] = ()
        num_actions = sum(len(actions_of(step)) for steps in table.ranks for step in steps)
        self._every = 1 + int(num_actions * _SIMULATED_S / _MOST_S)

    @property
    def num_times(self) -> int:
        """How many numbers each rank exchanges."""
        return 5 + len(KINDS) * len(self._stages)

    def note_data(self, data_s: float) -> None:
        """Note that this rank has its batch, after waiting `data_s` seconds for it."""
        self._data_s = data_s
        if not self._exchanged_s:  # the first step
            self._exchanged_s = time.perf_counter() - data_s

    def read(self, recorder: Recorder) -> tuple[float, ...]:
        """Return this rank's numbers, once the schedule has ended and gradients are reduced."""
        now_s = time.perf_counter()
        found: dict[tuple[int, str], list[float]] = defaultdict(list)
        for action in recorder.take():
            found[action.stage, action.kind].append(action.end_s - action.begin_s)
        means = (_mean(found[stage, kind]) for stage in self._stages for kind in KINDS)
        return (
            recorder.begun_s - self._exchanged_s,
            self._data_s,
            sum(map(sum, found.values())),
            recorder.ended_s - recorder.begun_s,
            now_s - recorder.ended_s,
            *means,
        )

    def note_exchange(self, rows: Sequence[Sequence[float]]) -> None:
        """Note that all ranks have just exchanged their numbers."""
        now_s = time.perf_counter()
        self._window_s, self._exchanged_s = now_s - self._exchanged_s, now_s
        self._rows = rows

    def simulates(self, step: int) -> bool:
        """Return whether the schedule is simulated after this step, counted from 1: so often that it costs 1 ms a step.

        Until then no rank can begin the next step, since rank 0 simulates.
        """
        return (step - 1) % self._every == 0

    def split(self, *, simulates: bool = True) -> tuple[RankTimes, ...]:
        """Return the parts of the last step of each pipeline rank; without simulating, what each has measured."""
        if not simulates:
            return measured_times(self._rows)
        return split_step(self.table, self._rows, self._window_s)


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0
