"""Microbatches through stages. The only file that knows torch.distributed.pipelining."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from manifests.placement import Placement
from runner.batches import IGNORED, Batch
from runner.chunk import StageChunk
from runner.recipe import BatchOptions, ScheduleName, check_schedule
from runner.wire import Wire

__all__ = ["Schedule", "build_schedule", "token_loss"]


class Schedule(Protocol):
    """The microbatches of a batch on their way through this rank's stages.

    Every rank of the pipeline calls the same method at the same time. A rank with the first stage
    needs the batch for its tokens, one with the last stage for its labels; others may pass None.
    """

    @property
    def has_first(self) -> bool: ...
    @property
    def has_last(self) -> bool: ...

    def train(self, batch: Batch | None) -> float | None:
        """Add the gradients of the batch's loss to every parameter's `.grad`.

        Gives the loss, the mean over the valid tokens of the whole batch, where the last stage is.
        """
        ...

    def evaluate(self, batch: Batch | None) -> float | None:
        """Give the loss of the batch where the last stage is; gradients stay as they are."""
        ...

    def logits(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Give the logits (B, L, V) of tokens (B, L) where the last stage is."""
        ...


def build_schedule(
    name: ScheduleName,
    chunks: Sequence[StageChunk],
    wire: Wire,
    placement: Placement,
    options: BatchOptions,
    group: dist.ProcessGroup | None = None,
) -> Schedule:
    """Give the schedule that runs this rank's chunks, which have their memory.

    `group` holds the ranks of one pipeline, in order; None means all. A single rank needs no
    pipeline: it takes each microbatch through its chunks in turn, with the same arithmetic.

    Raises:
        UsageError: see `runner.recipe.check_schedule`.
    """
    check_schedule(name, placement, options.num_microbatches)
    if placement.num_ranks == 1:
        return _Plain(chunks, options)
    return _Pipelined(name, _stages(chunks, wire, placement, options, group), options)


def token_loss(logits: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
    """Give a microbatch's part of the loss: summed cross-entropy over `num_tokens`, the whole batch's.

    # Note [Loss over tokens]
    Parts of all microbatches add up to the mean over the batch's valid tokens, however unevenly
    padding falls. A mean per microbatch, or `scale_grads=True`, gives other gradients; the loss
    alone would not show it.

    Shapes: logits (B, L, V), labels (B, L).
    """
    summed = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return summed / num_tokens


class _Plain:
    """One rank, all stages, no pipeline."""

    has_first = has_last = True

    def __init__(self, chunks: Sequence[StageChunk], options: BatchOptions) -> None:
        self._chunks, self._options = tuple(chunks), options
        self._device = chunks[0].device

    def train(self, batch: Batch | None) -> float:
        losses = []
        for tokens, labels, num_tokens in self._microbatches(batch):
            loss = token_loss(self._forward(tokens), labels, num_tokens=num_tokens)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return _total(losses)

    def evaluate(self, batch: Batch | None) -> float:
        with _evaluating(self._chunks):
            return _total(
                [
                    token_loss(self._forward(tokens), labels, num_tokens=num_tokens)
                    for tokens, labels, num_tokens in self._microbatches(batch)
                ]
            )

    def logits(self, tokens: torch.Tensor | None) -> torch.Tensor:
        _check_shape(tokens, self._options)
        assert tokens is not None
        with _evaluating(self._chunks):
            parts = torch.split(tokens.to(self._device), self._options.microbatch)
            return torch.cat([self._forward(part) for part in parts])

    def _forward(self, tensor: torch.Tensor) -> torch.Tensor:
        for chunk in self._chunks:
            tensor = chunk(tensor)
        return tensor

    def _microbatches(self, batch: Batch | None) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        assert batch is not None, "the only rank reads the data"
        _check_shape(batch.tokens, self._options)
        tokens, labels = (
            torch.split(tensor.to(self._device), self._options.microbatch) for tensor in (batch.tokens, batch.labels)
        )
        for token_part, label_part in zip(tokens, labels, strict=True):
            yield token_part, label_part, batch.num_tokens


class _Pipelined:
    """A schedule of torch.distributed.pipelining over this rank's stages."""

    def __init__(self, name: ScheduleName, stages: list[PipelineStage], options: BatchOptions) -> None:
        self._stages, self._options = stages, options
        self._device = stages[0].device
        self.has_first = any(stage.is_first for stage in stages)
        self.has_last = any(stage.is_last for stage in stages)
        # See Note [Loss over tokens].
        self.torch_schedule = _TORCH_SCHEDULES[name](
            stages if name == "Interleaved1F1B" else stages[0],
            n_microbatches=options.num_microbatches,
            loss_fn=token_loss,
            scale_grads=False,
        )

    def train(self, batch: Batch | None) -> float | None:
        losses: list[torch.Tensor] = []
        args, kwargs = self._inputs(batch, losses)
        self.torch_schedule.step(*args, **kwargs, return_outputs=False)
        return _total(losses) if self.has_last else None

    def evaluate(self, batch: Batch | None) -> float | None:
        losses: list[torch.Tensor] = []
        args, kwargs = self._inputs(batch, losses)
        self._eval(args, {**kwargs, "return_outputs": False})
        return _total(losses) if self.has_last else None

    def logits(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        labels = torch.full((self._options.global_batch, self._options.seq_len), IGNORED)
        if tokens is None:
            assert not self.has_first, "the rank with the first stage needs tokens"
            tokens = torch.zeros_like(labels)
        args, kwargs = self._inputs(Batch(tokens=tokens, labels=labels, num_tokens=1), [])
        return self._eval(args, {**kwargs, "return_outputs": True})

    def _eval(self, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        with _evaluating([stage.submod for stage in self._stages]):
            outputs: torch.Tensor | None = self.torch_schedule.eval(*args, **kwargs)
        for stage in self._stages:
            stage.clear_runtime_states()  # or the activations of every microbatch stay
        return outputs

    def _inputs(
        self, batch: Batch | None, losses: list[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        if not (self.has_first or self.has_last):
            return (), {}
        assert batch is not None, "ranks with the first or the last stage read the data"
        _check_shape(batch.tokens, self._options)
        args = (batch.tokens.to(self._device),) if self.has_first else ()
        if not self.has_last:
            return args, {}
        return args, {
            "target": batch.labels.to(self._device),
            "losses": losses,
            "loss_kwargs": {"num_tokens": batch.num_tokens},
        }


_TORCH_SCHEDULES: Mapping[ScheduleName, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}


def _stages(
    chunks: Sequence[StageChunk],
    wire: Wire,
    placement: Placement,
    options: BatchOptions,
    group: dist.ProcessGroup | None,
) -> list[PipelineStage]:
    # Shapes are given, never inferred: inference would run a forward on garbage.
    return [
        PipelineStage(
            chunk,
            chunk.stage,
            placement.num_stages,
            chunk.device,
            input_args=wire.example(chunk.stage, options.microbatch, options.seq_len),
            output_args=wire.example(chunk.stage + 1, options.microbatch, options.seq_len),
            group=group,
        )
        for chunk in chunks
    ]


def _check_shape(tokens: torch.Tensor | None, options: BatchOptions) -> None:
    # The pipeline would receive a shorter sequence into stale buffers, in silence.
    expected = (options.global_batch, options.seq_len)
    if tokens is not None and tuple(tokens.shape) != expected:
        raise ValueError(f"expected tokens of shape {expected}, found {tuple(tokens.shape)}")


@contextmanager
def _evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in chunks:
            chunk.train()


def _total(losses: Sequence[torch.Tensor]) -> float:
    # Exact, so that no order of microbatches shows; one transfer from the device.
    return math.fsum(torch.stack(list(losses)).detach().tolist())
