"""One optimizer step: forward and backward, ties, norm, clip, AdamW."""

from __future__ import annotations

from dataclasses import dataclass

from runner.batches import Batch
from runner.norm import StepTotals, clip_gradients
from runner.optim import Optimizer
from runner.schedule import Schedule
from runner.ties import Tie, sync_gradients

__all__ = ["Engine", "StepReport", "eval_step", "train_step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What one rank trains with."""

    schedule: Schedule
    ties: tuple[Tie, ...]
    totals: StepTotals
    optimizer: Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What a step came to; the same on every rank."""

    loss: float  # mean over the valid tokens of the global batch, before the step
    num_tokens: int  # valid ones
    grad_norm: float  # before clipping
    lr: float


def train_step(engine: Engine, batch: Batch | None, step: int) -> StepReport:
    """Take optimizer step number `step`, the first being 0; every rank calls this.

    The clipped gradients stay in `.grad` until the next step. Ranks with neither the first nor the
    last stage may pass no batch.

    Raises:
        RankError: on all ranks alike, before any weight changes, if a gradient is not finite.
    """
    optimizer = engine.optimizer
    optimizer.zero_gradients()
    loss = engine.schedule.train(batch)
    sync_gradients(engine.ties)
    totals = engine.totals.reduce(loss, batch.num_tokens if batch else 0)
    own = (parameter for _, parameter in optimizer.parameters)
    clip_gradients(own, totals.norm, optimizer.options.max_norm)
    lr = optimizer.step(step)
    return StepReport(loss=totals.loss, num_tokens=totals.num_tokens, grad_norm=totals.norm, lr=lr)


def eval_step(engine: Engine, batch: Batch | None) -> float:
    """Give the loss of a batch, on every rank; nothing is trained."""
    return engine.totals.reduce_loss(engine.schedule.evaluate(batch))
