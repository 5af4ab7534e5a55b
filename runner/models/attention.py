"""Causal attention on any device, whole or in a window, with or without sinks; and rotary position embeddings.

They are computed as Hugging Face does, so that Q and K need no permutation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from runner.models.rope_fields import Rope, Yarn
from runner.models.titan_modules import CosSinRoPE, Module

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


class RotaryEmbedding(CosSinRoPE):  # type: ignore[misc]
    """torchtitan's rotate-half RoPE with the frequencies of Llama 3.1, or of YaRN.

    torchtitan's own YaRN is left alone: its layers fold a factor into the scale of their scores.

    Source: transformers 5.23, `modeling_rope_utils.py`, `_compute_llama3_parameters`, `_compute_yarn_parameters`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        yarn: Yarn | None = None

    def _precompute_cache(self) -> torch.Tensor:
        """Return cosines and sines of every position: (max_seq_len, 2 x dim), float32."""
        config, factor = self.config, 1.0
        powers = config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)
        inv_freq = 1.0 / powers
        if config.yarn is not None:
            inv_freq, factor = _blend(powers, config.yarn, config.dim, config.theta), config.yarn.attention_factor
        elif config.scaling == "llama":
            inv_freq = _stretch(inv_freq, config)
        angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


class InterleavedRotaryEmbedding(RotaryEmbedding):
    """The same for queries and keys with interleaved pairs; the result has the two halves separated."""

    @dataclass(kw_only=True, slots=True)
    class Config(RotaryEmbedding.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        apart = (torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1) for heads in (query, key))
        rotated: tuple[torch.Tensor, torch.Tensor] = CosSinRoPE.apply_rotary_emb(*apart, rope_cache)
        return rotated


def rotary_config(
    rope: Rope, *, max_seq_len: int, kind: type[RotaryEmbedding.Config] = RotaryEmbedding.Config
) -> RotaryEmbedding.Config:
    """Return the config of the module for a rotary embedding and sequences of at most `max_seq_len` tokens."""
    rotary = kind(dim=rope.dim, max_seq_len=max_seq_len, theta=rope.theta, yarn=rope.yarn)
    if rope.llama3 is not None:
        rotary.scaling = "llama"
        rotary.scaling_factor = rope.llama3.factor
        rotary.low_freq_factor = rope.llama3.low_freq_factor
        rotary.high_freq_factor = rope.llama3.high_freq_factor
        rotary.original_max_position_embeddings = rope.llama3.context
    return rotary


def _seen(begin: int, end: int, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a mask: which of the keys from `first` up to `end` each query from `begin` on sees."""
    behind = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def _attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output, (B, N, L, H), and the log-sum-exp of each query's scores, (B, N, L)."""
    outputs, sums = [], []
    for begin in range(0, q.shape[2], _BLOCK):
        end = min(begin + _BLOCK, q.shape[2])
        first = 0 if window is None else max(0, begin - window + 1)
        scores = (q[:, :, begin:end] @ k[:, :, first:end].transpose(2, 3)).float() * scale
        scores = scores.masked_fill(~_seen(begin, end, first, window, q.device), float("-inf"))
        outputs.append(scores.softmax(-1).to(v.dtype) @ v[:, :, first:end])
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _stretch(inv_freq: torch.Tensor, config: RotaryEmbedding.Config) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend between."""
    context = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * (inv_freq / config.scaling_factor) + blend * inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / config.scaling_factor, inv_freq)
    is_between = (wavelength <= context / low) & (wavelength >= context / high)
    return torch.where(is_between, blended, scaled)


def _blend(powers: torch.Tensor, yarn: Yarn, dim: int, theta: float) -> torch.Tensor:
    """Divide frequencies that turn less than `beta_slow` times in the context, keep those past `beta_fast`."""
    low, high = (
        dim * math.log(yarn.context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    unscaled = 1 - ramp.clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - unscaled) + 1.0 / powers * unscaled
