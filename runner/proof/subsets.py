"""The parts of a run's combination that few ranks can try: the whole of it if it fits, or else overlapping subsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from manifests.placement import Placement
from manifests.schema import TieGroup, TieMember
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions
from runner.pipeline.timetable import Timetable
from runner.proof.combination import Combination
from runner.training.build import Stages

MOST_RANKS = 16
_SHARING = ("replicate", "shard", "context", "tensor")  # degrees that are ranks; experts are over the same ones
_FLAGS = {"replicate": "--dp-replicate", "shard": "--dp-shard", "context": "--cp", "tensor": "--tp", "expert": "--ep"}
_WHOLE = ("pipeline", "of its whole length")


def subsets_of(run: Combination, most_ranks: int = MOST_RANKS) -> tuple[Combination, ...]:
    """Return what can be tried of a combination on this number of ranks: all of it, or subsets of its degrees.

    The whole pipeline, if it has at most this number of ranks, is in one of them, and each pair of degrees that fits in
    one. A pipeline that is shortened keeps its schedule and its stages on each rank; neighboring ones are joined.
    """
    few = run.tiny_degrees
    sharing = [dim for dim in _SHARING if getattr(few, dim) > 1]
    tried = {
        dims: tiny
        for count in range(len(sharing) + 1)
        for dims in combinations(sharing, count)
        if (tiny := _degrees(run, dims, most_ranks)) is not None
    }
    if (whole := tried.get(tuple(sharing))) == few:
        return (_with_degrees(run, whole),)
    longest = max(degrees.pipeline for degrees in tried.values())
    pairs = {
        dims: _pairs(degrees) | ({_WHOLE} if degrees.pipeline == longest else set[tuple[str, str]]())
        for dims, degrees in tried.items()
    }
    missing, chosen = set[tuple[str, str]]().union(*pairs.values()), list[ParallelDims]()
    while missing:
        best = max(pairs, key=lambda dims: (len(pairs[dims] & missing), len(dims)))
        missing -= pairs[best]
        chosen.append(tried[best])
    return tuple(_with_degrees(run, degrees) for degrees in chosen)


def describe_degrees(tried: ParallelDims, full: ParallelDims) -> str:
    """Write the degrees of a subset as flags, with those of the run where they are more."""
    parts = [("pp", tried.pipeline, full.pipeline)]
    parts += [(_FLAGS[dim], getattr(tried, dim), getattr(full, dim)) for dim in _FLAGS if getattr(tried, dim) > 1]
    return " ".join(f"{name} {few}" + (f" (of {many})" if few < many else "") for name, few, many in parts)


def _degrees(run: Combination, dims: Sequence[str], most_ranks: int) -> ParallelDims | None:
    """Return these degrees of a tiny model alone, with the longest pipeline that fits; None: nothing does.

    A schedule of a file is for its whole pipeline.
    """
    few = run.tiny_degrees
    alone = ParallelDims(pipeline=1, **{dim: getattr(few, dim) for dim in dims})
    most = min(few.pipeline, most_ranks // alone.per_stage)
    if not most:
        return None
    if run.timetable.file is not None and most < few.pipeline:
        most = 1
    divisors = (count for count in range(2, most + 1) if few.pipeline % count == 0)
    expert = few.expert if alone.per_replica % few.expert == 0 else 1
    return replace(alone, pipeline=max(divisors, default=most), expert=expert)


def _pairs(degrees: ParallelDims) -> set[tuple[str, str]]:
    """Return the pairs of dimensions that meet in a subset; a dimension by itself is a pair, too."""
    dims = [dim for dim in ("pipeline", *_FLAGS) if getattr(degrees, dim) > 1]
    return {*combinations(dims, 2), *((dim, dim) for dim in dims)}


def _with_degrees(run: Combination, degrees: ParallelDims) -> Combination:
    """Return a combination with these degrees, and as many microbatches in a pipeline as the run has."""
    batch = run.options.batch
    count = max(1, batch.num_microbatches // run.degrees.data)
    batch = BatchOptions(
        global_batch=count * batch.microbatch * degrees.data, microbatch=batch.microbatch, seq_len=batch.seq_len
    )
    run = replace(run, options=replace(run.options, batch=batch))
    return replace(_shorter(run, degrees.pipeline), degrees=degrees)


def _shorter(run: Combination, num_ranks: int) -> Combination:
    """Join neighboring stages, so that the pipeline has this number of ranks."""
    before, stages = run.stages.placement, run.stages
    if num_ranks == before.num_ranks:
        return run
    placement = Placement(num_stages=num_ranks * before.num_virtual, num_ranks=num_ranks, style=before.style)
    place = [stage * placement.num_stages // before.num_stages for stage in range(before.num_stages)]

    def joined(member: TieMember) -> TieMember:
        return replace(member, stage=place[member.stage])

    modules = [list[str]() for _ in range(placement.num_stages)]
    for stage, names in enumerate(stages.modules):
        modules[place[stage]] += names
    ties = (TieGroup(owner=joined(tie.owner), replicas=tuple(map(joined, tie.replicas))) for tie in run.stages.ties)
    return replace(
        run,
        stages=Stages(modules=tuple(map(tuple, modules)), placement=placement, ties=tuple(ties)),
        timetable=Timetable(name=run.timetable.name, placement=placement),
    )
