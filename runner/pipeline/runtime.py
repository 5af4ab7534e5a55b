"""A pipeline over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed as dist

from runner.config.schema import BatchOptions
from runner.data.sequences import Batch
from runner.pipeline.chunk import StageChunk
from runner.pipeline.heads import loss_of, of_evaluation, output_form
from runner.pipeline.losses import Loss, MtpLoss
from runner.pipeline.microbatches import check_shape, context_of, evaluating, total
from runner.pipeline.stage_io import StageIO
from runner.pipeline.stage_metadata import StageMetadata
from runner.pipeline.timetable import Timetable
from runner.pipeline.torch_runtime import RuntimeStage, runtime_of
from runner.profiling.trace import Recorder

# Gradients and a loss; a loss without gradients.
Purpose = Literal["train", "evaluate"]
_MOST_LANES = 4  # each keeps the buffers of what it receives


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lane:
    """torch's stages and runtime for batches of one shape and one purpose on this rank."""

    stages: tuple[RuntimeStage, ...]
    stage_ios: tuple[StageIO, ...]  # one for each stage
    runtime: Any  # runs the actions of a table


class Pipeline:
    """A schedule over several ranks; see `runner.pipeline.schedule.Schedule`.

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
        return total(losses).item() if self.has_last else None

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


def _of_rows(loss: Callable[[torch.Tensor, Batch], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss of the last stage's output and the numbers of its rows in the batch."""

    def of_rows(output: torch.Tensor, rows: torch.Tensor, *, batch: Batch) -> torch.Tensor:
        return loss(output, batch.rows(int(rows[0]), len(rows)))

    return of_rows
