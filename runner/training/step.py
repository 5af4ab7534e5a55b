"""One optimizer step: forward and backward, tied gradients, gradient clipping, the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from manifests.errors import RankError
from runner.config.schema import BatchOptions
from runner.data.rows import RowForm
from runner.data.sequences import Batch
from runner.parallel.parallelize import Parallel
from runner.pipeline.heads import of_evaluation
from runner.pipeline.losses import Loss, MtpLoss
from runner.pipeline.schedule import Schedule
from runner.profiling.trace import Clock
from runner.training.expert_balance import ExpertBalance, ExpertReport
from runner.training.gradient_norm import Number, StepTotals, clip_gradients
from runner.training.optimizer import Optimizer
from runner.training.ties import Tie, follow_leaders, sync_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What one rank trains with."""

    schedule: Schedule
    ties: tuple[Tie, ...]
    totals: StepTotals
    optimizer: Optimizer
    clock: Clock
    parallel: Parallel | None = None  # None: no other rank shares the stages of this one
    loss: Loss | None = None  # of the schedule; None: cross-entropy
    mtp_loss: MtpLoss | None = None  # of the schedule, if the model has MTP layers
    balance: ExpertBalance | None = None  # None: nothing watches routers

    @property
    def form(self) -> RowForm | None:
        """The fields of rows that the loss reads."""
        return None if self.loss is None else self.loss.form


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The result of a step; the same on every rank."""

    loss: float  # mean over the valid tokens of the global batch, before the step; without that of MTP layers
    num_tokens: int  # valid ones
    grad_norm: float  # before clipping
    lr: float
    is_last: bool = False  # a rank was asked to stop, see `runner.distributed.watchdog`
    is_damaged: bool = False  # a rank has found that what it loaded is damaged, see `runner.load.deferred`
    experts: ExpertReport | None = None
    mtp_loss: float | None = None  # the mean of those of MTP layers


def train_step(
    engine: Engine,
    batch: Batch | None,
    step: int,
    cut: BatchOptions | None = None,
    *,
    is_last: bool = False,
    is_damaged: bool = False,
) -> StepReport:
    """Take optimizer step number `step`, the first being 0; every rank calls this.

    The clipped gradients stay in `.grad` until the next step. Ranks with neither the first nor the
    last stage may pass no batch. All ranks pass the same `cut` where it is not that of the run, see
    Note [Shapes are declared] in schedule.py.
    """
    optimizer = engine.optimizer
    optimizer.zero_gradients()
    if engine.parallel is not None:
        engine.parallel.defer_gradient_sync()
    if engine.balance is not None:
        engine.balance.start(step + 1, cut)
    recorder, clock = engine.schedule.recorder, engine.clock
    recorder.start(is_timed=clock.times(step + 1))
    loss = engine.schedule.train(batch, cut)
    recorder.stop()
    if engine.parallel is not None:
        engine.parallel.reduce_gradients()
    sync_gradients(engine.ties)
    try:
        num_tokens = batch.num_tokens if batch else 0
        totals = engine.totals.reduce(
            loss,
            num_tokens,
            _count(engine),
            is_last=is_last,
            is_damaged=is_damaged,
            times_s=partial(clock.read, recorder),
            addends=_addends(engine),
        )
    except RankError as error:
        raise error.within(f"step {step + 1}") from error
    clock.note_exchange(totals.times_s)
    for _, parameter in optimizer.parameters if totals.scale != 1 else ():
        if parameter.grad is not None:
            parameter.grad *= totals.scale
    stepped = (parameter for _, parameter in optimizer.parameters if optimizer.is_clipped(parameter))
    clip_gradients(stepped, totals.norm, optimizer.options.max_norm)
    lr = optimizer.step(step)
    follow_leaders(engine.ties)
    own_loss, sums, mtp_loss = totals.loss, totals.sums, None
    if engine.mtp_loss is not None:
        mtp_loss, sums = math.fsum(row[0] for row in sums), tuple(row[1:] for row in sums)
        own_loss = engine.mtp_loss.without(own_loss, mtp_loss)
    experts = None if engine.balance is None else engine.balance.finish(sums)
    return StepReport(
        loss=own_loss,
        mtp_loss=mtp_loss,
        num_tokens=totals.num_tokens,
        grad_norm=totals.norm,
        lr=lr,
        is_last=totals.is_last,
        is_damaged=totals.is_damaged,
        experts=experts,
    )


def eval_counted(engine: Engine, batch: Batch | None, cut: BatchOptions | None = None) -> tuple[float, float | None]:
    """Return the loss of a batch, the mean over its labels, on every rank, and what it counts in their place, if it
    counts others; nothing is trained.
    """
    loss = engine.schedule.evaluate(batch, cut)
    if engine.parallel is not None:
        engine.parallel.reshard()
    mean, count = engine.totals.reduce_loss(loss, _count(engine))
    return mean, count if of_evaluation(engine.loss) else None


def _addends(engine: Engine) -> torch.Tensor | None:
    """Return what is summed over the ranks that share a stage: first, the loss of MTP layers."""
    addends = None if engine.balance is None else engine.balance.addends
    if engine.mtp_loss is None:
        return addends
    mean = engine.mtp_loss.take() * engine.totals.counts_loss
    return mean if addends is None else torch.cat([mean, addends])


def _count(engine: Engine) -> Number | None:
    return None if engine.loss is None else engine.loss.take_count()
