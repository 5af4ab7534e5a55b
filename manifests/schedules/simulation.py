"""Simulation of a schedule table with a cost per action: timeline and pipeline bubble."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple, get_args

from manifests.errors import ScheduleError
from manifests.placement import Placement
from manifests.schedules.actions import Action, ComputeKind, Table, actions_of
from manifests.schedules.order import check_finished, inputs_of

_Row = dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Seconds of a stage for one microbatch, and of a transfer between ranks."""

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]  # I: gradients of the stage's input
    weight_s: tuple[float, ...]  # W: gradients of its weights
    whole_s: tuple[float, ...] = ()  # B; if empty, as long as I and W together
    hop_s: float = 0.0

    def __post_init__(self) -> None:
        # NaN fails every comparison.
        times = (*self.forward_s, *self.input_s, *self.weight_s, *self.whole_s, self.hop_s)
        if not all(0 <= seconds < inf for seconds in times):
            problem = "expected finite times of at least 0 seconds"
            raise ScheduleError("costs", problem, code="schedule.invalid-costs")

    @classmethod
    def of(
        cls, forward_s: Sequence[float], backward_s: Sequence[float], *, input_share: float = 0.5,
        split_s: Sequence[float] = (), hop_s: float = 0.0, gap_s: float = 0.0,
    ) -> StageCosts:  # fmt: skip
        """Return costs from the whole backward of each stage, of which I takes `input_share`.

        One half is right for matrix products: one for the input, one for the weights. The first stage does not send
        a gradient: torch runs its whole backward as W. On others, I and W together take `split_s` longer. All but W
        hand their results on, which takes `gap_s`.
        """
        shares = [input_share if stage else 0.0 for stage in range(len(backward_s))]
        extra_s = [0.0, *split_s[1:]] if split_s else [0.0] * len(shares)
        parts = [(seconds * share + extra / 2, seconds * (1 - share) + extra / 2)
                 for seconds, share, extra in zip(backward_s, shares, extra_s, strict=True)]  # fmt: skip
        return cls(
            forward_s=tuple(seconds + gap_s for seconds in forward_s),
            input_s=tuple(inputs + gap_s for inputs, _ in parts),
            weight_s=tuple(weights for _, weights in parts),
            whole_s=tuple(seconds + gap_s for seconds in backward_s) if split_s else (),
            hop_s=hop_s,
        )

    def by_kind(self) -> dict[str, tuple[float, ...]]:
        """Return the seconds of each kind of action, by stage."""
        whole = self.whole_s or tuple(map(sum, zip(self.input_s, self.weight_s, strict=True)))
        return {"F": self.forward_s, "I": self.input_s, "W": self.weight_s, "B": whole}


class TimedAction(NamedTuple):
    """One action on the timeline, in seconds from the first action's start. A step has up to half a million."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The actions of each rank over time. Between its spans a rank waits."""

    ranks: tuple[tuple[TimedAction, ...], ...]
    makespan_s: float
    busy_s: tuple[float, ...]  # of each rank

    @property
    def bubble(self) -> float:
        """The pipeline bubble: the fraction of all ranks' time in which they wait, from 0 to 1."""
        total_s = len(self.ranks) * self.makespan_s
        return max(0.0, 1 - sum(self.busy_s) / total_s) if total_s else 0.0


def simulate(table: Table, costs: StageCosts, begins_s: Sequence[float] | None = None) -> Timeline:
    """Return the timeline of a table, in which each action starts as soon as its rank and its input are ready.

    Transfers take `hop_s` and do not block ranks. An Overlap takes as long as its two actions in sequence. Each rank
    starts at its time in `begins_s`; None: all at 0.
    """
    placement = table.placement
    wires = _wires(placement, costs)
    spans: list[list[TimedAction]] = [[] for _ in table.ranks]
    free_s, busy_s = list(begins_s or [0.0] * len(spans)), [0.0] * len(spans)
    at, ready, waiting = [0] * len(spans), deque(range(len(spans))), set[int]()
    while ready:
        rank = ready.popleft()
        steps = table.ranks[rank]
        while at[rank] < len(steps):
            end_s, ran = free_s[rank], []
            for action in actions_of(steps[at[rank]]):
                stage, kind, microbatch = action
                wire, start_s = wires[kind][stage], end_s
                for row, transfer_s in wire.inputs:
                    arrival_s = row.get(microbatch, inf) + transfer_s
                    if arrival_s > start_s:
                        start_s = arrival_s
                end_s = start_s + wire.seconds
                ran.append((action, start_s, end_s, wire))
            if end_s == inf:  # an input has not been computed yet: again when a neighbor's result is there
                waiting.add(rank)
                break
            at[rank] += 1
            free_s[rank] = end_s
            for action, start_s, action_end_s, wire in ran:
                spans[rank].append(TimedAction(action, start_s, action_end_s))
                busy_s[rank] += wire.seconds
                wire.results[action.microbatch] = end_s
                if wire.reader in waiting:
                    waiting.remove(wire.reader)
                    ready.append(wire.reader)
    if waiting:
        done = {
            (stage, kind, number) for kind in "FB" for stage, wire in enumerate(wires[kind]) for number in wire.results
        }
        check_finished(table.ranks, at, placement, done)
    return Timeline(
        ranks=tuple(map(tuple, spans)),
        makespan_s=max(free_s),
        busy_s=tuple(busy_s),
    )


@dataclass(kw_only=True, slots=True)
class _Wire:
    """What the actions of one kind on one stage take, read and write."""

    seconds: float
    results: _Row  # when each left the stage; I and B share a row, see `result_of`
    inputs: list[tuple[_Row, float]]  # the rows that an action needs, each with the seconds of the transfer
    reader: int | None = None  # the other rank that needs the results


def _wires(placement: Placement, costs: StageCosts) -> dict[str, list[_Wire]]:
    """Return the wires of each kind of action, by stage."""
    num_stages, rank_of = placement.num_stages, placement.rank_of
    rows: dict[str, list[_Row]] = {kind: [{} for _ in range(num_stages)] for kind in "FBW"}
    rows["I"] = rows["B"]
    wires = {
        kind: [_Wire(seconds=time, results=row, inputs=[]) for time, row in zip(seconds, rows[kind], strict=True)]
        for kind, seconds in costs.by_kind().items()
    }
    for kind, stage in product(get_args(ComputeKind), range(num_stages)):
        for source, needed, _ in inputs_of(Action(stage=stage, kind=kind, microbatch=0), num_stages):
            is_far = rank_of(source) != rank_of(stage)
            wires[kind][stage].inputs.append((rows[needed][source], costs.hop_s if is_far else 0.0))
            if is_far:
                for same in ("F",) if needed == "F" else ("B", "I"):
                    wires[same][source].reader = rank_of(stage)
    return wires
