"""The smallest change of a plan with which every rank stays within the memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from manifests.errors import UserError
from manifests.models.memory import estimate_memory
from manifests.models.training import Recompute
from manifests.schedules.actions import Table
from reshard.estimate.assumptions import MOST_PASSES, Assumptions, num_passes
from reshard.estimate.training_estimate import training_of
from reshard.layouts.model import StageLayout
from reshard.layouts.spelling import parse_layout
from reshard.packing.plan import StagedModel

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


def smallest_fit(staged: StagedModel) -> Fit | None:
    """Return the change with the fewest ranks, and of those the fewest values, that fits; None: none was found.

    Tried are activation checkpointing, more pipeline ranks, with the layers spread evenly, data-parallel shards and
    tensor-parallel ranks.
    """
    return _search(staged)[0]


def largest_tried(staged: StagedModel) -> tuple[str, ...]:
    """Return the largest value of each flag that `smallest_fit` has tried where nothing fits: `pp=64`."""
    return _search(staged)[1]


@lru_cache(maxsize=1)  # the text, the JSON and the picture of a plan all show it
def _search(staged: StagedModel) -> tuple[Fit | None, tuple[str, ...]]:
    """Return what fits, and of what was tried the change that needs the least memory a rank."""
    largest = staged.layout.placement.num_ranks, staged.assumed
    tables: dict[int, _Table | None] = {}
    hopeful: dict[object, bool] = {}  # whether the most shards fit: fewer need no less memory
    for num_pipeline, assumed in sorted(_candidates(staged), key=lambda candidate: _cost(staged, *candidate)):
        if num_pipeline not in tables:
            tables[num_pipeline] = _table(staged, num_pipeline)
        if (table := tables[num_pipeline]) is None:
            continue
        largest = num_pipeline, replace(assumed, recompute="full")
        if assumed.shard > 1:
            others = num_pipeline, assumed.tensor, assumed.recompute
            if others not in hopeful:
                most = replace(assumed, shard=staged.assumed.shard << _DOUBLINGS - 1)
                hopeful[others] = _fits(staged, *table, most)
            if not hopeful[others]:
                continue
        if _fits(staged, *table, assumed):
            changes = _changes(staged, num_pipeline, assumed)
            return Fit(num_ranks=num_pipeline * assumed.num_per_stage, changes=changes), changes
    return None, _changes(staged, *largest)


def _candidates(staged: StagedModel) -> Iterator[tuple[int, Assumptions]]:
    base, num_pipeline = staged.assumed, staged.layout.placement.num_ranks
    recomputes: dict[Recompute, None] = dict.fromkeys((base.recompute, "selective", "full"))
    tensors = [base.tensor << doubling for doubling in range(_DOUBLINGS)]
    for tensor in (degree for degree in tensors if degree == base.tensor or _is_possible(staged, degree)):
        for doubled in range(_DOUBLINGS):
            for sharded in range(_DOUBLINGS):
                for recompute in recomputes:
                    shard = base.shard << sharded
                    yield num_pipeline << doubled, replace(base, shard=shard, tensor=tensor, recompute=recompute)


def _is_possible(staged: StagedModel, tensor: int) -> bool:
    return tensor <= _MOST_TENSOR and staged.shape.hidden_size % tensor == 0 and staged.assumed.loss_chunk is None


def _cost(staged: StagedModel, num_pipeline: int, assumed: Assumptions) -> tuple[int, int, int]:
    return num_pipeline * assumed.num_per_stage, len(_changes(staged, num_pipeline, assumed)), assumed.tensor


def _changes(staged: StagedModel, num_pipeline: int, assumed: Assumptions) -> tuple[str, ...]:
    base = staged.assumed
    values = (
        ("pp", staged.layout.placement.num_ranks, num_pipeline),
        ("dp-shard", base.shard, assumed.shard),
        ("tp", base.tensor, assumed.tensor),
        ("ac", base.recompute, assumed.recompute),
    )
    return tuple(f"{name}={new}" for name, old, new in values if new != old)


def _table(staged: StagedModel, num_pipeline: int) -> _Table | None:
    """Return the plan's own layout, or an even one on so many pipeline ranks, and its schedule.

    None where there are too few layers, where no schedule supports it, or it is too long.
    """
    layout, placement = staged.layout, staged.layout.placement
    try:
        if num_pipeline != placement.num_ranks:
            spec = f"pp={num_pipeline},vpp={placement.num_virtual},style={placement.style}"
            layout = parse_layout(spec, staged.inventory)
        if num_passes(layout.placement, staged.assumed.microbatches_for(layout.placement)) > MOST_PASSES:
            return None
        return layout, staged.assumed.table_for(layout)
    except UserError:
        return None


def _fits(staged: StagedModel, layout: StageLayout, table: Table, assumed: Assumptions) -> bool:
    limit = staged.assumed.memory_limit
    ranks = estimate_memory(staged.shape, layout.stages, table, training_of(assumed, staged.shape)).ranks
    return limit is not None and all(memory.total <= limit for memory in ranks)
