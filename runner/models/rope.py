"""Rotary position embeddings as Hugging Face computes them, so that Q and K need no permutation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runner.models.rope_fields import Rope, Yarn
from runner.models.titan_modules import CosSinRoPE


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
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


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
