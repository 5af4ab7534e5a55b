"""The order of actions on every rank, by schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from manifests.placement import Placement
from manifests.schedules.actions import Action, Step, Table
from manifests.schedules.rules import ScheduleName, check_schedule, default_group
from manifests.schedules.vshaped import dualpipev, zbv


def schedule_table(
    name: str, placement: Placement, num_microbatches: int, *, microbatch_group: int | None = None
) -> Table:
    """Return the table of a schedule, in the order in which torch 2.13 runs it.

    `microbatch_group` (Interleaved1F1B) is how many microbatches pass through a stage before the rank switches to
    its next one: Megatron-Core's `microbatch_group_size_per_vp_stage`. The last group may be smaller. None: groups
    of equal size, as in torch.

    Raises:
        UsageError: see `manifests.schedules.rules.check_schedule`.
    Source: GPipe, arXiv 1811.06965; 1F1B and its interleaving, 2104.04473; LoopedBFS, 2211.05953;
        zero bubble and its v, 2401.10241; DualPipe, 2412.19437; groups, `get_schedule_table` in
        Megatron-Core's `pipeline_parallel/schedules.py`.
    """
    schedule = check_schedule(name, placement, num_microbatches, microbatch_group=microbatch_group)
    group = microbatch_group or default_group(placement.num_ranks, num_microbatches)
    ranks = tuple(
        tuple(_rank_steps(schedule, placement, num_microbatches, group, rank)) for rank in range(placement.num_ranks)
    )
    return Table(placement=placement, num_microbatches=num_microbatches, ranks=ranks)


_Turn = tuple[int, int]  # stage, microbatch


def _rank_steps(
    schedule: ScheduleName, placement: Placement, num_microbatches: int, group: int, rank: int
) -> Iterable[Step]:
    stages, ranks_after = placement.stages_on(rank), placement.num_ranks - 1 - rank
    match schedule:
        case "GPipe":
            turns = _one_group(stages, range(num_microbatches))
            return _alternate(turns, turns, num_warmup=len(turns))
        case "1F1B":
            turns = _one_group(stages, range(num_microbatches))
            return _alternate(turns, turns, num_warmup=ranks_after)
        case "LoopedBFS":
            turns = _one_group(stages, range(num_microbatches))
            return _alternate(turns, turns[::-1], num_warmup=len(turns))
        case "Interleaved1F1B":
            forwards, backwards = _in_groups(stages, num_microbatches, group)
            return _alternate(forwards, backwards, num_warmup=(len(stages) - 1) * group + 2 * ranks_after)
        case "InterleavedZeroBubble":
            forwards, backwards = _in_groups(stages, num_microbatches, group)
            num_warmup = (len(stages) - 1) * group + ranks_after
            # The later a rank starts, the more weight gradients it delays to the end, where it would be idle.
            return _split_backwards(_alternate(forwards, backwards, num_warmup), num_kept=rank)
        case "ZBVZeroBubble":
            return zbv(placement, num_microbatches, rank)
        case "DualPipeV":
            return dualpipev(placement, num_microbatches, rank)


def _one_group(stages: Sequence[int], microbatches: Sequence[int]) -> list[_Turn]:
    return [(stage, microbatch) for stage in stages for microbatch in microbatches]


def _in_groups(stages: Sequence[int], num_microbatches: int, group: int) -> tuple[list[_Turn], list[_Turn]]:
    """Return the order of forwards and of backwards: a group through all stages of the rank, then the next group."""
    forwards, backwards = list[_Turn](), list[_Turn]()
    for first in range(0, num_microbatches, group):
        microbatches = range(first, min(first + group, num_microbatches))
        forwards += _one_group(stages, microbatches)
        backwards += _one_group(stages[::-1], microbatches)
    return forwards, backwards


def _alternate(forwards: Sequence[_Turn], backwards: Sequence[_Turn], num_warmup: int) -> Iterator[Action]:
    """Yield the warmup forwards, then alternate forwards and backwards, then the remaining backwards."""
    ahead = iter(forwards)
    for stage, microbatch in islice(ahead, num_warmup):
        yield Action(stage=stage, kind="F", microbatch=microbatch)
    for stage, microbatch in backwards:
        for forward_stage, forward_microbatch in islice(ahead, 1):
            yield Action(stage=forward_stage, kind="F", microbatch=forward_microbatch)
        yield Action(stage=stage, kind="B", microbatch=microbatch)


def _split_backwards(actions: Iterable[Action], num_kept: int) -> Iterator[Action]:
    """Split each backward into I and W, with every W delayed by `num_kept` backwards."""
    kept = deque[Action]()
    for action in actions:
        if action.kind == "F":
            yield action
            continue
        yield action._replace(kind="I")
        kept.append(action._replace(kind="W"))
        if len(kept) > num_kept:
            yield kept.popleft()
    yield from kept
