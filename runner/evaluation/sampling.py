"""The next token, out of one position's logits."""

from __future__ import annotations

import torch

from manifests.errors import ModelError
from runner.evaluation.command import Sampling

__all__ = ["draw", "generators_of", "shares"]


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Give a token id; of equally likely ones, the first. Shapes: logits (V,), float32, on the CPU.

    Raises:
        InputError: logits that are infinite or not a number, or become so at this temperature.
    """
    if not (logits / (sampling.temperature or 1.0)).isfinite().all():
        raise ModelError(
            "",
            "the logits are not finite",
            "nor are the weights, or --dtype or --temperature is too low",
            code="model.not-finite",
        )
    if not sampling.temperature:
        return int(logits.argmax())
    return int(torch.multinomial(shares(logits, sampling), 1, generator=generator))


def shares(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Give the probability of every token: temperature first, then `top_k`, then `top_p`, as `transformers` has it."""
    warm = logits / sampling.temperature
    if sampling.top_k:
        kept = min(sampling.top_k, len(warm))
        warm = warm.masked_fill(warm < warm.topk(kept).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ascending, order = warm.sort()
        # Of the unlikeliest tokens, as many go as have no more than the rest; the likeliest stays.
        left_out = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        left_out[-1] = False
        warm = warm.masked_fill(torch.zeros_like(left_out).scatter(0, order, left_out), -torch.inf)
    return warm.softmax(-1)


def generators_of(sampling: Sampling, num_prompts: int) -> tuple[torch.Generator, ...]:
    """Give each prompt a generator of its own, so that what one draws does not depend on the others."""
    return tuple(torch.Generator().manual_seed(sampling.seed + number) for number in range(num_prompts))
