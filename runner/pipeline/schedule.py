"""Running the microbatches of a batch through stages: over the ranks of a pipeline, or on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import distributed as dist

from runner.config.schema import BatchOptions
from runner.data.sequences import Batch
from runner.pipeline.chunk import StageChunk
from runner.pipeline.heads import loss_of, of_evaluation
from runner.pipeline.losses import Loss, MtpLoss
from runner.pipeline.microbatches import check_shape, context_of, evaluating, total
from runner.pipeline.runtime import Pipeline
from runner.pipeline.stage_metadata import StageMetadata
from runner.pipeline.timetable import Timetable
from runner.profiling.trace import Recorder
from runner.tensors.heap import return_holes


class Schedule(Protocol):
    """Runs the microbatches of a batch through this rank's stages.

    Every rank of the pipeline calls the same method at the same time. A rank with the first stage needs the batch for
    its tokens, one with the last stage for its labels; others may pass None. A batch with positions is needed by all.

    # Note [Shapes are declared]
    Ranks in the middle see no data, and torch sends no shapes. So every rank passes the shape of a batch that differs
    from the run's own as `cut`, the same on all of them; callers know it without communication, from the options, the
    step or the text so far. Data of another shape is an error on the rank that has it. What a shape needs is built at
    its first use, and kept for the most recent few.
    """

    @property
    def has_first(self) -> bool: ...
    @property
    def has_last(self) -> bool: ...
    @property
    def recorder(self) -> Recorder:
        """The timer of the actions of `train`."""
        ...

    def train(self, batch: Batch | None, cut: BatchOptions | None = None) -> torch.Tensor | None:
        """Add the gradients of the batch's loss to every parameter's `.grad`.

        Returns the loss, the mean over the valid tokens of the whole batch, on ranks with the last stage: () in
        float64, on the device, since reading it would wait for the device.
        """
        ...

    def evaluate(self, batch: Batch | None, cut: BatchOptions | None = None) -> float | None:
        """Return the loss of the batch on ranks with the last stage; gradients are unchanged."""
        ...


def build_schedule(
    timetable: Timetable,
    chunks: Sequence[StageChunk],
    metadata: StageMetadata,
    options: BatchOptions,
    group: dist.ProcessGroup | None = None,
    loss: Loss | MtpLoss | None = None,
) -> Schedule:
    """Build the schedule that runs this rank's chunks, which are allocated; `options` has the run's batch shape.

    `group` is the ranks of one pipeline, in order; None means all. `loss` is cross-entropy if None. A single rank needs
    no pipeline: it runs each microbatch through its chunks in turn, with the same arithmetic.
    """
    if timetable.placement.num_ranks == 1:
        return _Plain(chunks, options, loss)
    return Pipeline(timetable, chunks, metadata, options, group, loss)


class _Plain:
    """One rank with all stages."""

    has_first = has_last = True

    def __init__(self, chunks: Sequence[StageChunk], options: BatchOptions, loss: Loss | MtpLoss | None) -> None:
        self._chunks, self._options, self._loss = tuple(chunks), options, loss
        self._device = chunks[0].device
        self.recorder = Recorder(self._device)

    def train(self, batch: Batch | None, cut: BatchOptions | None = None) -> torch.Tensor:
        losses, loss_fn, recorder = [], loss_of(self._chunks, self._loss), self.recorder
        last = self._chunks[-1].stage
        for number, microbatch in enumerate(self._microbatches(batch, cut)):
            crossing: Any = microbatch.tokens
            for chunk in self._chunks:
                with recorder.action("F", chunk.stage, number):
                    crossing = chunk(crossing, **context_of(chunk.family, microbatch, self._device))
                return_holes(self._device.type)
            with recorder.action("L", last, number):
                loss = loss_fn(crossing, microbatch)
            with recorder.action("B", last, number):  # of all stages at once
                torch.autograd.backward(loss)
            return_holes(self._device.type)
            losses.append(loss.detach())
        return total(losses)

    def evaluate(self, batch: Batch | None, cut: BatchOptions | None = None) -> float:
        loss_fn = loss_of(self._chunks, of_evaluation(self._loss))
        losses = []
        with evaluating(self._chunks):
            for microbatch in self._microbatches(batch, cut):
                crossing: Any = microbatch.tokens
                for chunk in self._chunks:
                    crossing = chunk(crossing, **context_of(chunk.family, microbatch, self._device))
                losses.append(loss_fn(crossing, microbatch))
        return total(losses).item()

    def _microbatches(self, batch: Batch | None, cut: BatchOptions | None) -> Iterator[Batch]:
        assert batch is not None, "the only rank reads the data"
        cut = cut or self._options
        check_shape(batch.tokens, cut)
        on_device = batch.map(lambda tensor: tensor.to(self._device))
        for begin in range(0, cut.global_batch, cut.microbatch):
            yield on_device.rows(begin, cut.microbatch)
