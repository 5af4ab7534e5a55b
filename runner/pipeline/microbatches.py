"""What every schedule does with a batch: its shape held against the one declared, its loss over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from runner.config.schema import BatchOptions
from runner.data.batches import IGNORED

__all__ = ["check_shape", "evaluating", "token_loss", "total"]


def token_loss(logits: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
    """Give a microbatch's part of the loss: summed cross-entropy over `num_tokens`, the whole batch's.

    # Note [Loss over tokens]
    Gradient accumulation sums the parts of all microbatches: the mean over the batch's valid tokens, however
    unevenly padding falls. A mean per microbatch, or `scale_grads=True`, gives other gradients; the loss
    alone would not show it.

    Shapes: logits (B, L, V), labels (B, L).
    """
    summed = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return summed / num_tokens


def check_shape(tokens: torch.Tensor, cut: BatchOptions) -> None:
    """Make sure that tokens have the shape that all ranks were told.

    The pipeline would receive a shorter sequence into stale buffers, in silence.

    Raises:
        ValueError: they have not: a mistake of the caller.
    """
    expected = (cut.global_batch, cut.seq_len)
    if tuple(tokens.shape) != expected:
        raise ValueError(f"expected tokens of shape {expected}, found {tuple(tokens.shape)}")


@contextmanager
def evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute without gradients, in evaluation mode, while the block runs."""
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in chunks:
            chunk.train()


def total(losses: Sequence[torch.Tensor]) -> float:
    """Add up the parts of a loss: exactly, so that no order of microbatches shows; one transfer from the device."""
    return math.fsum(torch.stack(list(losses)).detach().tolist())
