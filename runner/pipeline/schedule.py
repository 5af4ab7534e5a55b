"""Running the microbatches of a batch through stages: over the ranks of a pipeline, or on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import distributed as dist

from runner.config.schema import BatchOptions
from runner.data.sequences import Batch
from runner.distributed.world import wait_for_numbers
from runner.pipeline.chunk import StageChunk
from runner.pipeline.heads import loss_of, of_evaluation, output_form
from runner.pipeline.losses import Loss, MtpLoss
from runner.pipeline.microbatches import check_shape, context_of, evaluating, total
from runner.pipeline.stage_io import StageIO
from runner.pipeline.stage_metadata import StageMetadata
from runner.pipeline.timetable import Timetable
from runner.pipeline.torch_runtime import RuntimeStage, runtime_of
from runner.profiling.trace import Recorder
from runner.tensors.heap import return_holes

# Gradients and a loss; a loss without gradients.
Purpose = Literal["train", "evaluate"]
_MOST_LANES = 4  # each keeps the buffers of what it receives


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

    def train(self, batch: Batch | None, cut: BatchOptions | None = None) -> torch.Tensor | None:
        """Add the gradients of the batch's loss to every parameter's `.grad`.

        Returns the loss, the mean over the valid tokens of the whole batch, on ranks with the last stage: () in
        float64, on the device, since reading it would wait for the device.
        """

    def evaluate(self, batch: Batch | None, cut: BatchOptions | None = None) -> float | None:
        """Return the loss of the batch on ranks with the last stage; gradients are unchanged."""


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lane:
    """torch's stages and runtime for batches of one shape and one purpose on this rank."""

    stages: tuple[RuntimeStage, ...]
    stage_ios: tuple[StageIO, ...]  # one for each stage
    runtime: Any  # runs the actions of a table


class Pipeline:
    """A schedule over several ranks.

    # Note [One runtime for all schedules]
    torch's schedule runtime executes any table of actions. It gets ours: for training the table that was validated and
    that plans simulate, and for everything else one of forwards only, because torch's `eval` of v-shaped schedules
    fails (torch 2.13: "can't steal_bwd_input"). Receives are placed so that both ranks agree on their order; see
    Note [Order of transfers] in manifests/schedules/lowering.py.
    """

    def __init__(
        self,
        timetable: Timetable,
        chunks: Sequence[StageChunk],
        metadata: StageMetadata,
        options: BatchOptions,
        group: dist.ProcessGroup | None = None,
        loss: Loss | MtpLoss | None = None,
    ) -> None:
        self._loss = loss
        self._timetable, self._chunks, self._metadata = timetable, tuple(chunks), metadata
        self._options, self._group = options, group
        self._device = chunks[0].device
        self.recorder = Recorder(self._device)
        self._lanes: dict[tuple[Purpose, BatchOptions], Lane] = {}  # the most recently used at the end
        self.has_first = any(chunk.stage == 0 for chunk in chunks)
        self.has_last = any(chunk.stage == timetable.placement.num_stages - 1 for chunk in chunks)

    def train(self, batch: Batch | None, cut: BatchOptions | None = None) -> torch.Tensor | None:
        cut = cut or self._options
        losses: list[torch.Tensor] = []
        args, kwargs = self._inputs(batch, cut, losses)
        lane = self._enter("train", cut)
        lane.runtime.step(*args, **kwargs, return_outputs=False)
        for stage in lane.stages:
            stage.wait_for_sends("F")
            stage.wait_for_sends("B")
        return total(losses) if self.has_last else None

    def evaluate(self, batch: Batch | None, cut: BatchOptions | None = None) -> float | None:
        cut = cut or self._options
        losses: list[torch.Tensor] = []
        args, kwargs = self._inputs(batch, cut, losses)
        lane = self._enter("evaluate", cut)
        with evaluating(self._chunks):
            lane.runtime.eval(*args, **kwargs, return_outputs=False)
        for stage in lane.stages:
            stage.wait_for_sends("F")
            stage.clear_runtime_states()  # otherwise the activations of every microbatch stay in memory
        loss: float | None = wait_for_numbers(total(losses)) if self.has_last else None
        return loss

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        """Build the lane for batches of this shape. Shapes are declared: torch's inference would run on garbage."""
        num_microbatches, num_stages = cut.num_microbatches, self._timetable.placement.num_stages
        tables = self._timetable.training if purpose == "train" else self._timetable.forward
        table = tables(num_microbatches)
        forms = {
            boundary: self._metadata.form(boundary, cut.microbatch, cut.seq_len, is_training=purpose == "train")
            for chunk in self._chunks
            for boundary in (chunk.stage, chunk.stage + 1)
        }
        for chunk in self._chunks:
            forms[chunk.stage + 1] = output_form(chunk, forms[chunk.stage + 1])
        stages = tuple(
            RuntimeStage(
                chunk,
                chunk.stage,
                num_stages,
                chunk.device,
                input_args=forms[chunk.stage].examples(),
                output_args=forms[chunk.stage + 1].examples(),
                group=self._group,
            )
            for chunk in self._chunks
        )
        if purpose == "evaluate":
            loss = _of_rows(loss_of(self._chunks, of_evaluation(self._loss)))
        else:
            loss = self.recorder.loss(num_stages - 1, _of_rows(loss_of(self._chunks, self._loss)))
            for stage in stages:
                stage.recorder = self.recorder
        return Lane(
            stages=stages,
            stage_ios=tuple(
                StageIO(inputs=forms[chunk.stage], outputs=forms[chunk.stage + 1]) for chunk in self._chunks
            ),
            runtime=runtime_of(stages, table, loss),
        )

    def _enter(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        """Return the lane for a purpose and a shape, and switch the chunks to it."""
        key = (purpose, cut)
        lane = self._lanes.pop(key, None) or self.build_lane(purpose, cut)
        self._lanes[key] = lane
        if len(self._lanes) > _MOST_LANES:
            del self._lanes[next(iter(self._lanes))]
        for chunk, crossing in zip(self._chunks, lane.stage_ios, strict=True):
            chunk.io = crossing
        return lane

    def _inputs(
        self, batch: Batch | None, cut: BatchOptions, losses: list[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        context = context_of(self._chunks[0].family, batch, self._device)
        if not (self.has_first or self.has_last):
            return (), context
        assert batch is not None, "ranks with the first or the last stage read the data"
        check_shape(batch.tokens, cut)
        args = (batch.tokens.to(self._device),) if self.has_first else ()
        if not self.has_last:
            return args, context
        return args, {
            **context,
            "target": torch.arange(len(batch.tokens)),  # split as the rows are
            "losses": losses,
            "loss_kwargs": {"batch": batch.map(lambda tensor: tensor.to(self._device))},
        }


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
                for chunk in self._chunks:  # FSDP does not where no output of a chunk has a gradient
                    chunk.accumulate()
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


def _of_rows(loss: Callable[[torch.Tensor, Batch], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss of the last stage's output and the numbers of its rows in the batch."""

    def of_rows(output: torch.Tensor, rows: torch.Tensor, *, batch: Batch) -> torch.Tensor:
        return loss(output, batch.rows(int(rows[0]), len(rows)))

    return of_rows
