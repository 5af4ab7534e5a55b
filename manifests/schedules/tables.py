"""The order of actions on every rank, by schedule."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice

from manifests.placement import Placement
from manifests.schedules.actions import Action, ComputeKind, Overlap, Step, Table
from manifests.schedules.rules import ScheduleName, check_schedule, default_group


def schedule_table(
    name: str, placement: Placement, num_microbatches: int, *, microbatch_group: int | None = None
) -> Table:
    """Return the table of a schedule, in the order in which torch 2.13 runs it.

    `microbatch_group` (Interleaved1F1B) is how many microbatches pass through a stage before the rank switches to
    its next one: Megatron-Core's `microbatch_group_size_per_vp_stage`. The last group may be smaller. None: groups
    of equal size, as in torch.

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
    delayed = deque[Action]()
    for action in actions:
        if action.kind == "F":
            yield action
            continue
        yield action._replace(kind="I")
        delayed.append(action._replace(kind="W"))
        if len(delayed) > num_kept:
            yield delayed.popleft()
    yield from delayed


def zbv(placement: Placement, num_microbatches: int, rank: int) -> Iterator[Action]:
    """Yield one rank's actions of ZB-V: almost no bubble if F, I and W take equally long.

    Source: arXiv 2401.10241, section 6. The pattern is for at least 2P - 1 microbatches; with fewer, the actions of
    missing microbatches are dropped.
    """
    num_ranks = placement.num_ranks
    num_full = max(num_microbatches, 2 * num_ranks - 1)
    num_ahead = 2 * num_ranks - 1 - rank  # forwards on the way down before the first backward there
    (f0, i0, w0), (f1, i1, w1) = map(_actions_on, placement.stages_on(rank))  # 0 on the way down, 1 on the way up

    pattern = [f0] * (num_ahead - rank) + [f1, f0] * rank + [f1, i1, w1] * (num_ranks - rank)
    for number in range(num_full - num_ranks):
        pattern += [f0] if number < num_full - num_ahead else []
        pattern += [i0, w0, f1, i1, w1]
    pattern += [i0, i1] * rank + [i0, w0] * (num_ranks - rank) + [w1] * rank + [w0] * rank

    take = _numbering()
    for kind, stage in pattern:
        action = take(kind, stage)
        if action.microbatch < num_microbatches:
            yield action


def dualpipev(placement: Placement, num_microbatches: int, rank: int) -> Iterator[Step]:
    """Yield one rank's steps of DualPipeV: a forward of one stage beside a backward of the other.

    Source: `dualpipe/dualpipev.py` of deepseek-ai/DualPipe; arXiv 2412.19437, section 3.2.1.
    """
    ranks_after = placement.num_ranks - 1 - rank
    down, up = placement.stages_on(rank)
    take = _numbering()

    def beside(forward: int, backward: int) -> Overlap:
        return Overlap(forward=take("F", forward), backward=take("B", backward))

    for _ in range(2 * ranks_after):
        yield take("F", down)
    for _ in range(rank + 1):
        yield take("F", down)
        yield take("F", up)
    for _ in range(ranks_after):
        gradient = take("I", up)
        yield gradient
        yield _weights_of(gradient)
        yield take("F", up)
    for number in range(num_microbatches - 2 * placement.num_ranks + rank + 1):
        if number == 0 and ranks_after == 0:  # all ranks wait for this backward, so it must not wait for a forward
            yield take("F", down)
            yield take("B", up)
        else:
            yield beside(down, up)
        yield beside(up, down)
    for _ in range(ranks_after):
        yield take("B", up)
        yield beside(up, down)

    # All forwards are done. The later backwards are split, and their weight gradients fill the bubbles.
    delayed = deque[Action]()
    for number in range(2 * (rank + 1)):
        backward = take("B" if number < rank + 1 else "I", down if number % 2 else up)
        yield backward
        if backward.kind == "I":
            delayed.append(_weights_of(backward))
    for _ in range(ranks_after):
        yield delayed.popleft()
        gradient = take("I", down)
        yield gradient
        delayed.append(_weights_of(gradient))
    yield from delayed


_StageAction = tuple[ComputeKind, int]  # an action on a stage, before it has a microbatch


def _actions_on(stage: int) -> tuple[_StageAction, _StageAction, _StageAction]:
    return ("F", stage), ("I", stage), ("W", stage)


def _numbering() -> Callable[[ComputeKind, int], Action]:
    """Return a function that numbers the actions of each stage and kind; I and B count as one kind."""
    counts = defaultdict[tuple[str, int], "count[int]"](count)

    def take(kind: ComputeKind, stage: int) -> Action:
        counted = "B" if kind == "I" else kind
        return Action(stage=stage, kind=kind, microbatch=next(counts[counted, stage]))

    return take


def _weights_of(gradient: Action) -> Action:
    return Action(stage=gradient.stage, kind="W", microbatch=gradient.microbatch)
