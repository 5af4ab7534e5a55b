"""A run's own combination of stages, schedule, degrees and options, and what is tried of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from manifests.errors import UserError
from runner.config.balance import BalanceOptions
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions, ComputeOptions
from runner.models.family import WithMtp
from runner.models.routers import Routed
from runner.pipeline.losses import Loss
from runner.pipeline.timetable import Timetable
from runner.proof.reference import LENGTH
from runner.proof.stages import Proven
from runner.training.build import Stages

Dtype = Literal["fp32", "fp64"]  # of a tiny model
_MOST_LARGE = 32  # microbatches of a pipeline that have several rows
_RATE = 0.01  # by which biases of routers move
_CHUNK = 5  # tokens of a chunk of the loss: fewer than a tiny microbatch has


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """What a run is made of, and what is compared of it."""

    family: Proven
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
        if not isinstance(family, Routed) or (isinstance(family, WithMtp) and family.mtp is not None):
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
