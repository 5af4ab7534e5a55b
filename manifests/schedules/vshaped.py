"""The schedules of stages placed in a v: rank r has stage r on the way down and stage 2P - 1 - r on the way up."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import count

from manifests.placement import Placement
from manifests.schedules.actions import Action, ComputeKind, Overlap, Step


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
    kept = deque[Action]()
    for number in range(2 * (rank + 1)):
        backward = take("B" if number < rank + 1 else "I", down if number % 2 else up)
        yield backward
        if backward.kind == "I":
            kept.append(_weights_of(backward))
    for _ in range(ranks_after):
        yield kept.popleft()
        gradient = take("I", down)
        yield gradient
        kept.append(_weights_of(gradient))
    yield from kept


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
