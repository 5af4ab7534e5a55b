"""The smallest change of a plan with which every rank stays within the memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from manifests.errors import UserError
from manifests.models.combinations import why_not_proven
from manifests.models.memory import estimate_memory
from manifests.models.training import Recompute
from manifests.schedules.actions import Table
from reshard.estimate.assumptions import MOST_PASSES, Assumptions, check_assumptions, num_passes
from reshard.estimate.training_estimate import training_of
from reshard.formats.open import config_of
from reshard.layouts.model import StageLayout
from reshard.layouts.spelling import parse_layout
from reshard.packing.launchable import check_launch
from reshard.packing.plan import PlanResult

_DOUBLINGS = 6  # of each degree, at most
_MOST_TENSOR = 8  # the GPUs of a node, usually


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What fits: the values that differ from the plan's, under the names of their flags, and the ranks of the job."""

    num_ranks: int
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join(self.changes)


def smallest_fit(planned: PlanResult) -> Fit | None:
    """Return the change with the fewest ranks, and of those the fewest values, that fits; None: none was found.

    Tried are activation checkpointing, more pipeline ranks, with the layers spread evenly, data-parallel shards and
    tensor-parallel ranks, as far as a launch accepts them.
    """
    return _search(planned)[0]


def largest_tried(planned: PlanResult) -> tuple[str, ...]:
    """Return the largest value of each flag that `smallest_fit` has tried where nothing fits: `pp=64`."""
    return _search(planned)[1]


@lru_cache(maxsize=1)  # the text, the JSON and the picture of a plan all show it
def _search(planned: PlanResult) -> tuple[Fit | None, tuple[str, ...]]:
    """Return what fits, and of what was tried the change that needs the least memory a rank."""
    largest = planned.layout.placement.num_ranks, planned.assumed
    layouts: dict[int, StageLayout | None] = {}
    tables: dict[tuple[int, int], Table | None] = {}
    hopeful: dict[object, bool] = {}  # whether the most shards fit: fewer need no less memory
    for num_pipeline, assumed in sorted(_candidates(planned), key=lambda candidate: _cost(planned, *candidate)):
        if num_pipeline not in layouts:
            layouts[num_pipeline] = _layout(planned, num_pipeline)
        if (layout := layouts[num_pipeline]) is None or not _is_accepted(planned, layout, assumed):
            continue
        size = num_pipeline, assumed.microbatches_for(layout.placement)
        if size not in tables:
            tables[size] = _table(layout, assumed)
        if (table := tables[size]) is None:
            continue
        largest = num_pipeline, replace(assumed, recompute="full")
        if assumed.shard > 1:
            others = size, assumed.tensor, assumed.recompute
            if others not in hopeful:
                most = replace(assumed, shard=planned.assumed.shard << _DOUBLINGS - 1)
                hopeful[others] = _fits(planned, layout, table, most)
            if not hopeful[others]:
                continue
        if _fits(planned, layout, table, assumed):
            changes = _changes(planned, num_pipeline, assumed)
            return Fit(num_ranks=num_pipeline * assumed.num_per_stage, changes=changes), changes
    return None, _changes(planned, *largest)


def _candidates(planned: PlanResult) -> Iterator[tuple[int, Assumptions]]:
    base, num_pipeline = planned.assumed, planned.layout.placement.num_ranks
    recomputes: dict[Recompute, None] = dict.fromkeys((base.recompute, "selective", "full"))
    tensors = [base.tensor << doubling for doubling in range(_DOUBLINGS)]
    for tensor in (degree for degree in tensors if degree == base.tensor or degree <= _MOST_TENSOR):
        for doubled in range(_DOUBLINGS):
            for sharded in range(_DOUBLINGS):
                for recompute in recomputes:
                    shard = base.shard << sharded
                    yield num_pipeline << doubled, replace(base, shard=shard, tensor=tensor, recompute=recompute)


def _cost(planned: PlanResult, num_pipeline: int, assumed: Assumptions) -> tuple[int, int, int]:
    return num_pipeline * assumed.num_per_stage, len(_changes(planned, num_pipeline, assumed)), assumed.tensor


def _changes(planned: PlanResult, num_pipeline: int, assumed: Assumptions) -> tuple[str, ...]:
    base = planned.assumed
    values = (
        ("pp", planned.layout.placement.num_ranks, num_pipeline),
        ("dp-shard", base.shard, assumed.shard),
        ("tp", base.tensor, assumed.tensor),
        ("ac", base.recompute, assumed.recompute),
    )
    return tuple(f"{name}={new}" for name, old, new in values if new != old)


def _layout(planned: PlanResult, num_pipeline: int) -> StageLayout | None:
    """Return the plan's own layout, or an even one on so many pipeline ranks; None where there are too few layers."""
    placement = planned.layout.placement
    if num_pipeline == placement.num_ranks:
        return planned.layout
    try:
        spec = f"pp={num_pipeline},vpp={placement.num_virtual},style={placement.style}"
        return parse_layout(spec, planned.inventory)
    except UserError:
        return None


def _is_accepted(planned: PlanResult, layout: StageLayout, assumed: Assumptions) -> bool:
    """Whether a plan of these degrees is not refused, nor a launch of it, nor by the proof before step 1."""
    try:
        check_assumptions(assumed)
        forecast = replace(planned.forecast, assumed=assumed, schedule=assumed.schedule_for(layout))
        check_launch(planned.checkpoint, layout, forecast)
    except UserError:
        return False
    training = training_of(assumed, planned.shape)
    return not why_not_proven(planned.shape.architecture, config_of(planned.checkpoint), training)


def _table(layout: StageLayout, assumed: Assumptions) -> Table | None:
    """Return the schedule of a step; None where no schedule supports the layout and batch, or it is too long."""
    if num_passes(layout.placement, assumed.microbatches_for(layout.placement)) > MOST_PASSES:
        return None
    try:
        return assumed.table_for(layout)
    except UserError:
        return None


def _fits(planned: PlanResult, layout: StageLayout, table: Table, assumed: Assumptions) -> bool:
    limit = planned.assumed.memory_limit
    ranks = estimate_memory(planned.shape, layout.stages, table, training_of(assumed, planned.shape)).ranks
    return limit is not None and all(memory.total <= limit for memory in ranks)
