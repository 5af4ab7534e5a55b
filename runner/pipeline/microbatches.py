"""What all schedules share: the check of a batch's shape, the loss over tokens, evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from runner.config.schema import BatchOptions
from runner.data.rows import IGNORED
from runner.data.sequences import Batch
from runner.models.family import Family, row_inputs_of


def token_loss(logits: torch.Tensor, labels: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
    """Return a microbatch's contribution to the loss: its summed cross-entropy over the batch's `num_tokens`.

    # Note [Loss over tokens]
    Gradient accumulation sums the parts of all microbatches: the mean over the batch's valid tokens, however
    unevenly padding falls. A mean per microbatch, or `scale_grads=True`, gives other gradients; the loss
    alone would not show it.

    Shapes: logits (B, L, V), labels (B, L).
    """
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    summed = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return summed / num_tokens


def check_shape(tokens: torch.Tensor, cut: BatchOptions) -> None:
    """Check that tokens have the shape that all ranks expect.

    The pipeline would silently receive a shorter sequence into stale buffers.
    """
    expected = (cut.global_batch, cut.seq_len)
    if tuple(tokens.shape) != expected:
        raise ValueError(f"expected tokens of shape {expected}, found {tuple(tokens.shape)}")


def context_of(family: Family, batch: Batch | None, device: torch.device) -> dict[str, torch.Tensor]:
    """Return what every stage needs of a batch besides its input, split by microbatch, as keyword arguments.

    # Note [Documents on every stage]
    Each stage makes its own masks and rotary embeddings. If only the first stage had the positions of documents, no
    shape would differ, and gradients would be wrong by as much as they are large.

    Shapes: position_ids and attention_mask (B, L).
    """
    if batch is None:
        return {}
    inputs = row_inputs_of(family, batch.tokens, batch.labels, batch.positions)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@contextmanager
def evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Switch to evaluation mode, without gradients, while the block runs; then each module has its own mode again."""
    modes = {module: module.training for chunk in chunks for module in chunk.modules()}
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes.items():  # parents first, as they change the modes of their children
            if module.training != is_training:
                module.train(is_training)
        for module, is_training in modes.items():
            module.training = is_training  # of a child that several parents share


def total(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the contributions to a loss in float64, so that the order of microbatches has no effect; nothing is read."""
    return torch.stack(list(losses)).detach().double().sort().values.sum()  # of float32: exact
