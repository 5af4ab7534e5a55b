"""A head that computes the loss in chunks of tokens, so that the logits of a microbatch are never all in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.data.sequences import IGNORED


class ChunkedHead:
    """The head of the last stage, applied in the loss instead of in the forward.

    # Note [Chunked loss]
    The stage outputs its hidden states, and the loss computes the logits of `num_tokens` of them, sums their
    cross-entropy and frees them; the backward recomputes them. That is one extra product with the head's weight for
    every three. `torch.nn.functional.linear_cross_entropy` avoids it by computing gradients in the forward, but then
    keeps one as large as the weight for every microbatch in flight. The gradients of chunks are summed in another
    order than those of a whole microbatch: equal to about 1e-7.

    Shapes: hidden (B, L, D), labels (B, L).
    """

    def __init__(self, module: nn.Module, num_tokens: int) -> None:
        self.module, self.num_tokens, self.is_whole = module, num_tokens, False
        self.width = width_of(module)  # of hidden; less than the layers' width in some models
        self._project: Callable[[torch.Tensor], torch.Tensor] = module.forward
        module.forward = self._forward  # hooks on the module still run

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """Return a microbatch's contribution to the loss; see `runner.pipeline.microbatches.token_loss`."""
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
    """Return D, the width of a head's input."""
    weight = head.get_parameter("weight")
    return weight.shape[1]
