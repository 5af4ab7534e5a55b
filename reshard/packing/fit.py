"""The smallest change of a plan with which every rank stays within the memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from manifests.errors import UserError
from manifests.models.memory import estimate_memory
from manifests.models.training import Recompute
from manifests.schedules import Table, check_schedule, schedule_table
from reshard.estimate.assumptions import MOST_PASSES, Assumptions, num_passes
from reshard.estimate.training_estimate import training_of
from reshard.layouts.model import StageLayout
from reshard.layouts.spelling import parse_layout
from reshard.packing.resolve import LaidOut

_DOUBLINGS = 6  # of each degree, at most
_MOST_TENSOR = 8  # the GPUs of a node, usually
_Table = tuple[StageLayout, Table]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What fits: the values that differ from the plan's, under the names of their flags, and the ranks of the job."""

    num_ranks: int
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join(self.changes)


def smallest_fit(laid: LaidOut) -> Fit | None:
    """Return the change with the fewest ranks, and of those the fewest values, that fits; None: none was found.

    Tried are activation checkpointing, more pipeline ranks, with the layers spread evenly, data-parallel shards and
    tensor-parallel ranks.
    """
    return _search(laid)[0]


def largest_tried(laid: LaidOut) -> tuple[str, ...]:
    """Return the largest value of each flag that `smallest_fit` has tried where nothing fits: `pp=64`."""
    return _search(laid)[1]


@lru_cache(maxsize=1)  # the text, the JSON and the picture of a plan all show it
def _search(laid: LaidOut) -> tuple[Fit | None, tuple[str, ...]]:
    """Return what fits, and of what was tried the change that needs the least memory a rank."""
    largest = laid.layout.placement.num_ranks, laid.assumed
    tables: dict[int, _Table | None] = {}
    hopeful: dict[object, bool] = {}  # whether the most shards fit: fewer need no less memory
    for num_pipeline, assumed in sorted(_candidates(laid), key=lambda found: _cost(laid, *found)):
        if num_pipeline not in tables:
            tables[num_pipeline] = _table(laid, num_pipeline)
        if (table := tables[num_pipeline]) is None:
            continue
        largest = num_pipeline, replace(assumed, recompute="full")
        if assumed.shard > 1:
            others = num_pipeline, assumed.tensor, assumed.recompute
            if others not in hopeful:
                most = replace(assumed, shard=laid.assumed.shard << _DOUBLINGS - 1)
                hopeful[others] = _fits(laid, *table, most)
            if not hopeful[others]:
                continue
        if _fits(laid, *table, assumed):
            changes = _changes(laid, num_pipeline, assumed)
            return Fit(num_ranks=num_pipeline * assumed.num_per_stage, changes=changes), changes
    return None, _changes(laid, *largest)


def _candidates(laid: LaidOut) -> Iterator[tuple[int, Assumptions]]:
    asked, num_pipeline = laid.assumed, laid.layout.placement.num_ranks
    recomputes: dict[Recompute, None] = dict.fromkeys((asked.recompute, "selective", "full"))
    tensors = [asked.tensor << doubling for doubling in range(_DOUBLINGS)]
    for tensor in (each for each in tensors if each == asked.tensor or _is_possible(laid, each)):
        for doubled in range(_DOUBLINGS):
            for sharded in range(_DOUBLINGS):
                for recompute in recomputes:
                    shard = asked.shard << sharded
                    yield num_pipeline << doubled, replace(asked, shard=shard, tensor=tensor, recompute=recompute)


def _is_possible(laid: LaidOut, tensor: int) -> bool:
    return tensor <= _MOST_TENSOR and laid.shape.hidden_size % tensor == 0 and laid.assumed.loss_chunk is None


def _cost(laid: LaidOut, num_pipeline: int, assumed: Assumptions) -> tuple[int, int, int]:
    return num_pipeline * assumed.num_per_stage, len(_changes(laid, num_pipeline, assumed)), assumed.tensor


def _changes(laid: LaidOut, num_pipeline: int, assumed: Assumptions) -> tuple[str, ...]:
    asked = laid.assumed
    values = (
        ("pp", laid.layout.placement.num_ranks, num_pipeline),
        ("dp-shard", asked.shard, assumed.shard),
        ("tp", asked.tensor, assumed.tensor),
        ("ac", asked.recompute, assumed.recompute),
    )
    return tuple(f"{name}={new}" for name, old, new in values if new != old)


def _layout(laid: LaidOut, num_pipeline: int) -> StageLayout | None:
    """Return the plan's own layout, or an even one on more ranks; None where there are too few layers."""
    placement = laid.layout.placement
    if num_pipeline == placement.num_ranks:
        return laid.layout
    try:
        spec = f"pp={num_pipeline},vpp={placement.num_virtual},style={placement.style}"
        return parse_layout(spec, laid.inventory)
    except UserError:
        return None


def _table(laid: LaidOut, num_pipeline: int) -> _Table | None:
    """Return a layout on so many pipeline ranks and its schedule; None where there is none, or it is too long."""
    layout = _layout(laid, num_pipeline)
    if layout is None:
        return None
    placement, num_microbatches = layout.placement, laid.assumed.microbatches_for(layout.placement)
    if num_passes(placement, num_microbatches) > MOST_PASSES:
        return None
    try:
        schedule = check_schedule(laid.assumed.schedule_for(layout), placement, num_microbatches)
    except UserError:
        return None
    return layout, schedule_table(schedule, placement, num_microbatches)


def _fits(laid: LaidOut, layout: StageLayout, table: Table, assumed: Assumptions) -> bool:
    limit = laid.assumed.memory_limit
    ranks = estimate_memory(laid.shape, layout.stages, table, training_of(assumed)).ranks
    return limit is not None and all(memory.total <= limit for memory in ranks)
