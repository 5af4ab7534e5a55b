"""Causal attention on any device, whole or in a window, with or without sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from runner.models.titan_modules import Module

_BLOCK = 512  # queries whose scores are made together, where a kernel does not do it

Transform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class CausalAttention(Module):  # type: ignore[misc]
    """Causal attention, under torchtitan's argument names.

    With `out_transform`, which is what torchtitan's sinks are, scores are made in float32 and kept for the
    backward: B N L (W + 512) of them for a window of W, half of B N L L without one.

    Shapes: (B, L, N, H); B = batch, L = tokens, N = heads, H = width of a head, which may be another for values.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        window: int | None = None  # keys that a query sees, its own included
        scale: float | None = None  # of scores; None: what the layer asks for

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window, self.scale = config.window, config.scale

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Transform | None = None,
    ) -> torch.Tensor:
        assert attention_masks is None, "the mask is always causal"
        q, k, v = (heads.transpose(1, 2) for heads in (q_BLNH, k_BLNH, v_BLNH))
        scale = scale if self.scale is None else self.scale
        window = self.window if self.window is not None and self.window < q.shape[2] else None
        if window is None and out_transform is None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            return out.transpose(1, 2)
        if (shared := q.shape[1] // k.shape[1]) > 1:
            k, v = (heads.repeat_interleave(shared, dim=1) for heads in (k, v))
        if out_transform is None:
            seen = _seen(0, q.shape[2], 0, window, q.device)
            return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(1, 2)
        out, lse = _attend_in_blocks(q, k, v, window, q.shape[-1] ** -0.5 if scale is None else scale)
        return out_transform(out.transpose(1, 2), lse.transpose(1, 2))


def _seen(begin: int, end: int, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Tell which of the keys from `first` up to `end` each query from `begin` on sees."""
    behind = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def _attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output, (B, N, L, H), and the log-sum-exp of each query's scores, (B, N, L)."""
    found, sums = [], []
    for begin in range(0, q.shape[2], _BLOCK):
        end = min(begin + _BLOCK, q.shape[2])
        first = 0 if window is None else max(0, begin - window + 1)
        scores = (q[:, :, begin:end] @ k[:, :, first:end].transpose(2, 3)).float() * scale
        scores = scores.masked_fill(~_seen(begin, end, first, window, q.device), float("-inf"))
        found.append(scores.softmax(-1).to(v.dtype) @ v[:, :, first:end])
        sums.append(scores.logsumexp(-1))
    return torch.cat(found, dim=2), torch.cat(sums, dim=2)
