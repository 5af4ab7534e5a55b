"""A run's own combination of stages, schedule, degrees and options, and the subsets of it that few ranks try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from manifests.errors import UserError
from manifests.placement import Placement
from manifests.schema import TieGroup, TieMember
from runner.config.flags import TrainOptions
from runner.config.loss import BalanceOptions
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions, ComputeOptions
from runner.models.family import OnTransformers
from runner.models.routers import Routed
from runner.pipeline.losses import Loss
from runner.pipeline.timetable import Timetable
from runner.proof.stages import LENGTH, SelfChecked
from runner.training.build import Stages

Dtype = Literal["fp32", "fp64"]  # of a tiny model
_MOST_LARGE = 32  # microbatches of a pipeline that have several rows
_RATE = 0.01  # by which biases of routers move
_CHUNK = 5  # tokens of a chunk of the loss: fewer than a tiny microbatch has


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What a run is made of, and what is compared of it."""

    family: SelfChecked
    stages: Stages
    timetable: Timetable
    degrees: ParallelDims
    options: TrainOptions
    has_documents: bool = False
    loss: Loss | None = None  # None: cross-entropy

    @property
    def tiny_degrees(self) -> ParallelDims:
        full = self.degrees
        few = {dim: min(getattr(full, dim), 2) for dim in ("replicate", "shard", "context", "tensor", "expert")}
        if min(full.expert, full.expert_fsdp) > 1 and few["shard"] * few["context"] * few["tensor"] == 2:
            few["shard"] = min(full.shard, 4)  # experts that several ranks have are sharded, too
        return ParallelDims(pipeline=full.pipeline, **few)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the job that have the tiny model, in order."""
        full, few = self.degrees, self.tiny_degrees
        return tuple(
            (((stage * full.replicate + replica) * full.shard + shard) * full.context + part) * full.tensor + slice_
            for stage in range(full.pipeline)
            for replica in range(few.replicate)
            for shard in range(few.shard)
            for part in range(few.context)
            for slice_ in range(few.tensor)
        )

    @property
    def batch(self) -> BatchOptions:
        """One pipeline's part of a batch, with the rows' whole length."""
        run, most = self.options.batch, self.options.batch.num_microbatches // self.degrees.data
        counts: Sequence[int] = range(min(most, max(2, 2 * self.degrees.pipeline)), most + 1)
        if self.timetable.file is not None:
            counts = (self.timetable.file.num_microbatches,)
        count = next(count for count in counts if self._supports(count))
        is_large = count <= _MOST_LARGE or self.loss is not None  # a loss may be of pairs of rows
        microbatch = min(run.microbatch, 2 if is_large else 1)  # one process takes all rows at once
        if self.loss is not None:
            microbatch = max(microbatch, self.loss.num_together)
        return BatchOptions(global_batch=count * microbatch, microbatch=microbatch, seq_len=LENGTH)

    @property
    def balance(self) -> BalanceOptions:
        """What acts on routers, by amounts that show in a step; nothing with MTP layers, which see other tokens."""
        run, family = self.options.balance, self.family
        if not isinstance(family, Routed) or (isinstance(family, OnTransformers) and family.mtp is not None):
            return BalanceOptions()
        return BalanceOptions(bias_rate=_RATE if run.bias_rate else 0.0, aux_loss=1.0 if run.aux_loss else 0.0)

    def _supports(self, num_microbatches: int) -> bool:
        try:
            self.timetable.check(num_microbatches)
        except UserError:
            return False
        return True

    def compute(self, dtype: Dtype) -> ComputeOptions:
        """Return the run's options with another dtype of computation, and chunks that a tiny row has several of."""
        run = self.options.compute
        chunk = None if run.loss_chunk is None else min(run.loss_chunk, _CHUNK)
        master = "fp64" if run.has_masters else dtype
        dtypes: dict[str, Any] = {"dtype": dtype, "master_dtype": master, "reduce_dtype": master}
        return replace(run, loss_chunk=chunk, is_compiled=False, **dtypes)

    def __str__(self) -> str:
        """Write the features on the command line."""
        return " ".join(flag for flag, _ in self.features())

    def features(self) -> Iterator[tuple[str, Combination]]:
        """Yield each feature beside stages and schedule, as written on the command line, and a run with it alone."""
        run, degrees = self.options.compute, self.degrees
        plain = replace(
            self,
            degrees=ParallelDims(pipeline=degrees.pipeline),
            has_documents=False,
            loss=None,
            options=replace(
                self.options, compute=replace(run, recompute="none", loss_chunk=None), balance=BalanceOptions()
            ),
        )
        if self.has_documents:
            yield "--document-mask", replace(plain, has_documents=True)
        for flag, dim in (
            ("--cp", "context"),
            ("--tp", "tensor"),
            ("--dp-shard", "shard"),
            ("--dp-replicate", "replicate"),
        ):
            if (degree := getattr(degrees, dim)) > 1:
                tried = getattr(self.tiny_degrees, dim)
                shown = f"{flag} {degree}" + (f" (as {tried})" if tried < degree else "")
                yield shown, replace(plain, degrees=replace(plain.degrees, **{dim: 2}))
        if degrees.expert > 1:
            shown = f"--ep {degrees.expert}" + (" (as 2)" if degrees.expert > 2 else "")
            shard = 4 if degrees.expert_fsdp > 1 and degrees.shard > 2 else 2
            yield shown, replace(plain, degrees=replace(plain.degrees, shard=shard, expert=2))
        if run.recompute != "none":
            alone = replace(plain.options.compute, recompute=run.recompute)
            yield f"--ac {run.recompute}", replace(plain, options=replace(plain.options, compute=alone))
        if run.loss_chunk is not None:
            alone = replace(plain.options.compute, loss_chunk=run.loss_chunk)
            yield f"--loss-chunk {run.loss_chunk}", replace(plain, options=replace(plain.options, compute=alone))
        for flag, name in (("--router-bias-rate", "bias_rate"), ("--router-aux-loss", "aux_loss")):
            if getattr(self.balance, name):
                value = getattr(self.options.balance, name)
                balance = BalanceOptions(**{name: value})
                yield f"{flag} {value:g}", replace(plain, options=replace(plain.options, balance=balance))
        if self.loss is not None:
            yield "--loss", replace(plain, loss=self.loss)
        yield "", plain


_MOST_RANKS = 16
_SHARING = ("replicate", "shard", "context", "tensor")  # degrees that are ranks; experts are over the same ones
_FLAGS = {"replicate": "--dp-replicate", "shard": "--dp-shard", "context": "--cp", "tensor": "--tp", "expert": "--ep"}
_WHOLE = ("pipeline", "of its whole length")


def subsets_of(run: Combination) -> tuple[Combination, ...]:
    """Return what can be tried of a combination on 16 ranks: all of it, or subsets of its degrees.

    The whole pipeline, if it has at most this number of ranks, is in one of them, and each pair of degrees that fits in
    one. A pipeline that is shortened keeps its schedule and its stages on each rank; neighboring ones are joined.
    """
    few = run.tiny_degrees
    sharing = [dim for dim in _SHARING if getattr(few, dim) > 1]
    tried = {
        dims: tiny
        for count in range(len(sharing) + 1)
        for dims in combinations(sharing, count)
        if (tiny := _degrees(run, dims)) is not None
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


def _degrees(run: Combination, dims: Sequence[str]) -> ParallelDims | None:
    """Return these degrees of a tiny model alone, with the longest pipeline that fits; None: nothing does.

    A schedule of a file is for its whole pipeline.
    """
    few = run.tiny_degrees
    alone = ParallelDims(pipeline=1, **{dim: getattr(few, dim) for dim in dims})
    most = min(few.pipeline, _MOST_RANKS // alone.per_stage)
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
