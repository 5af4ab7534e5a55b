"""What few ranks try of a combination: all of it, or subsets that overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manifests.placement import Placement
from manifests.schema import TieGroup, TieMember
from runner.config.flags import parse_training
from runner.config.parallel_dims import ParallelDims
from runner.data.rows import RowForm
from runner.pipeline.losses import Loss
from runner.pipeline.timetable import find_timetable
from runner.proof.combination import Combination, subsets_of
from runner.training.build import Stages

ANY: Any = None


def combination(pp: int, style: Any = "loop", vpp: int = 1, **degrees: int) -> Combination:
    placement = Placement(num_stages=pp * vpp, num_ranks=pp, style=style)
    last, dims = placement.num_stages - 1, ParallelDims(pipeline=pp, **degrees)
    tie = TieGroup(owner=TieMember(fqn="a", stage=0), replicas=(TieMember(fqn="b", stage=last),))
    count = 2 * placement.num_stages
    schedule = "ZBVZeroBubble" if style == "v" else "Interleaved1F1B" if vpp > 1 else "1F1B"
    return Combination(
        family=ANY,
        stages=Stages(modules=tuple((f"m{stage}",) for stage in range(last + 1)), placement=placement, ties=(tie,)),
        timetable=find_timetable(schedule, placement, count),
        degrees=dims,
        options=parse_training(["--data", "synthetic", "--global-batch", str(count * dims.data)]),
    )


def test_loss_over_several_rows_has_them_in_each_tiny_microbatch() -> None:
    triples = SimpleNamespace(num_together=3)
    run = replace(combination(2), loss=Loss(cast("Any", triples), RowForm()))
    batch = replace(run.options.batch, global_batch=24, microbatch=6)
    tried = replace(run, options=replace(run.options, batch=batch)).batch
    assert (tried.microbatch, tried.global_batch) == (3, 12)


@pytest.mark.parametrize(
    "run",
    [
        combination(8, replicate=2, shard=8, context=2, tensor=8),
        combination(16, shard=64, expert=64),
        combination(16, "v", 2, tensor=2, replicate=2),
        combination(6, vpp=3, shard=2, tensor=2, context=2, expert=2),
        combination(32, vpp=2, shard=2),
    ],
    ids=lambda run: str(run.degrees),
)
def test_subsets_have_every_pair_of_degrees_and_the_longest_pipeline(run: Combination) -> None:
    subsets, few = subsets_of(run), run.tiny_degrees
    names = [name for name in ("pipeline", "replicate", "shard", "context", "tensor", "expert")
             if getattr(few, name) > 1]  # fmt: skip
    tried = {pair for subset in subsets for pair in combinations(names, 2)
             if all(getattr(subset.degrees, name) > 1 for name in pair)}  # fmt: skip
    assert tried == {*combinations(names, 2)}
    assert max(subset.degrees.pipeline for subset in subsets) == min(few.pipeline, 16)
    for subset in subsets:
        placement = subset.stages.placement
        assert subset.degrees.world_size <= 16
        assert (placement.num_ranks, placement.style) == (subset.degrees.pipeline, run.stages.placement.style)
        assert placement.num_virtual == run.stages.placement.num_virtual
        assert sum(subset.stages.modules, ()) == sum(run.stages.modules, ())
        assert all(subset.stages.modules)
        (tie,) = subset.stages.ties
        assert [member.stage for member in tie.members] == [0, placement.num_stages - 1]
        subset.timetable.check(subset.batch.num_microbatches)
