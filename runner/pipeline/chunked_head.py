"""A head that gives the loss of a few tokens at a time, so that the logits of a microbatch are never all there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.data.batches import IGNORED

__all__ = ["ChunkedHead", "width_of"]


class ChunkedHead:
    """The head of the last stage, kept back until the labels are there.

    # Note [Logits a few tokens at a time]
    The stage hands its hidden states on, and the loss makes logits of `num_tokens` of them, sums their
    cross-entropy and forgets them; the backward makes them once more. That is one more product with
    the head's weight in three. `torch.nn.functional.linear_cross_entropy` spares it by computing
    gradients in the forward, but then keeps one as large as the weight for every microbatch in flight.
    The parts' gradients are added up in another order than a whole microbatch's: equal to about 1e-7.

    Shapes: hidden (B, L, D), labels (B, L).
    """

    def __init__(self, module: nn.Module, num_tokens: int) -> None:
        self.module, self.num_tokens, self.is_whole = module, num_tokens, False
        self.width = width_of(module)  # of hidden: of some models, less than the layers'
        self._project: Callable[[torch.Tensor], torch.Tensor] = module.forward
        module.forward = self._forward  # hooks on the module stay as they are

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """Give a microbatch's part of the loss; see `runner.pipeline.microbatches.token_loss`."""
        summed: torch.Tensor = self.module(hidden, labels)
        return summed / num_tokens

    def _forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return self._project(hidden) if self.is_whole else hidden
        parts = zip(
            torch.split(hidden.flatten(0, 1), self.num_tokens),
            torch.split(labels.flatten(), self.num_tokens),
            strict=True,
        )
        summed = [checkpoint(self._sum, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(summed).sum()

    def _sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self._project(hidden).float()
        return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


def width_of(head: nn.Module) -> int:
    """Return D, the width of the hidden states that a head takes."""
    weight = head.get_parameter("weight")
    return weight.shape[1]
