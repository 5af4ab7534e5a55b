"""Sample the next token from the logits of one position."""

from __future__ import annotations

import torch

from manifests.errors import ModelError
from runner.evaluation.command import Sampling

__all__ = ["draw", "generators_of", "shares"]


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token id; of equally likely ones, the first. Shapes: logits (V,), float32, on the CPU.

    Raises:
        InputError: logits that are infinite or not a number, or become so at this temperature.
    """
    if not (logits / (sampling.temperature or 1.0)).isfinite().all():
        raise ModelError(
            "",
            "the logits are not finite",
            "check that the weights are finite, or use --dtype fp32 or a higher --temperature",
            code="model.not-finite",
        )
    if not sampling.temperature:
        return int(logits.argmax())
    return int(torch.multinomial(shares(logits, sampling), 1, generator=generator))


def shares(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the probability of every token: temperature first, then `top_k`, then `top_p`, as in `transformers`."""
    warm = logits / sampling.temperature
    if sampling.top_k:
        kept = min(sampling.top_k, len(warm))
        warm = warm.masked_fill(warm < warm.topk(kept).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ascending, order = warm.sort()
        # The least likely tokens beyond `top_p` are removed; the most likely one is always kept.
        left_out = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        left_out[-1] = False
        warm = warm.masked_fill(torch.zeros_like(left_out).scatter(0, order, left_out), -torch.inf)
    return warm.softmax(-1)


def generators_of(sampling: Sampling, num_prompts: int) -> tuple[torch.Generator, ...]:
    """Return a generator for each prompt, so that their samples do not depend on each other."""
    return tuple(torch.Generator().manual_seed(sampling.seed + number) for number in range(num_prompts))
