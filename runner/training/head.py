"""A head that gives the loss of a few tokens at a time, so that the logits of a microbatch are never all there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from manifests.errors import UsageError
from runner.data.batches import IGNORED
from runner.dimensions.mesh import TENSOR
from runner.dimensions.shards import mesh_dims
from runner.families import Family
from runner.pipeline.chunk import StageChunk, build_chunks
from runner.pipeline.microbatches import token_loss
from runner.pipeline.parts import part_of

__all__ = ["ChunkedHead", "chunk_head", "loss_of", "whole_heads"]


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
        self.width = _width_of(module)  # of hidden: of some models, less than the layers'
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


def chunk_head(chunks: Sequence[StageChunk], num_stages: int, num_tokens: int) -> None:
    """Keep back the head where it is on one of these chunks, which have their weights.

    Raises:
        UsageError: the head is not on the last stage, or the model does more to its logits than the head.
    """
    for chunk in chunks:
        head = chunk.family.modules[-1]
        if head not in chunk.module_names:
            continue
        if chunk.stage != num_stages - 1:
            raise UsageError(
                "--loss-chunk", f"{head} is on stage {chunk.stage}, and the loss on stage {num_stages - 1}"
            )
        module = part_of(chunk, head)
        if any(TENSOR in mesh_dims(parameter) for parameter in module.parameters()):
            raise UsageError("--loss-chunk", f"{head} is cut over tensor-parallel ranks", "leave it out, or --tp")
        if not _ends_with_head(chunk.family, chunk.device):
            raise UsageError(
                "--loss-chunk", f"{chunk.family.architecture} does more to its logits than {head}", "leave it out"
            )
        chunk.head = ChunkedHead(module, num_tokens)


def loss_of(chunks: Iterable[StageChunk]) -> Callable[..., torch.Tensor]:
    """Give the function from what the last stage hands on, and labels, to a microbatch's part of the loss."""
    return next((chunk.head.loss for chunk in chunks if chunk.head is not None), token_loss)


@contextmanager
def whole_heads(chunks: Iterable[StageChunk]) -> Iterator[None]:
    """Let the last stage hand on logits while the block runs."""
    heads = [chunk.head for chunk in chunks if chunk.head is not None]
    for head in heads:
        head.is_whole = True
    try:
        yield
    finally:
        for head in heads:
            head.is_whole = False


@torch.no_grad()
def _ends_with_head(family: Family, device: torch.device) -> bool:
    """Whether the model's logits are what its head gives, seen on a head of zeros that takes no memory."""
    (alone,) = build_chunks(family, (family.modules[-1:],), (0,))
    family.init_buffers(alone.body, device)
    head = part_of(alone, family.modules[-1])
    given: list[torch.Tensor] = []
    head.register_forward_hook(lambda _, args, out: given.append(out))
    zero = torch.zeros((), device=device)
    weights = {name: zero.expand(parameter.shape) for name, parameter in alone.body.named_parameters()}
    out = functional_call(alone.body, weights, zero.expand(1, 2, _width_of(head)))
    return out is given[0]


def _width_of(head: nn.Module) -> int:
    weight = head.get_parameter("weight")
    return weight.shape[1]
