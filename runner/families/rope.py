"""Rotary position embeddings as Hugging Face computes them, so that Q and K need no permutation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torchtitan.models.common import CosSinRoPE

from manifests.errors import InputError
from manifests.jsontext import kind_of

__all__ = ["RotaryEmbedding", "positive_number", "rotary_config"]

_DEFAULT_THETA = 10000.0


class RotaryEmbedding(CosSinRoPE):  # type: ignore[misc]
    """torchtitan's rotate-half RoPE with the frequencies of Llama 3.1.

    Source: transformers 5.23, `modeling_rope_utils.py`, `_compute_llama3_parameters`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        pass

    def _precompute_cache(self) -> torch.Tensor:
        """Give cosines and sines of every position: (max_seq_len, 2 x dim), float32."""
        config = self.config
        inv_freq = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim))
        if config.scaling == "llama":
            inv_freq = _stretch(inv_freq, config)
        angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


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


def rotary_config(
    config: Mapping[str, object], *, head_dim: int, max_seq_len: int, where: str
) -> RotaryEmbedding.Config:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises:
        InputError: a kind of RoPE, or a field of it, that is not modelled.
    """
    if head_dim % 2:
        raise InputError(f"{where}: head_dim", f"expected an even width for RoPE, found {head_dim}")
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = config.get(field) or {}
    if not isinstance(found, Mapping):
        raise InputError(f"{where}: {field}", f"expected an object, found {kind_of(found)}")
    outer, inner = f"{where}: ", f"{where}: {field}."
    for table, prefix in ((config, outer), (found, inner)):
        if table.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise InputError(f"{prefix}partial_rotary_factor", "is not modelled; expected 1.0 or nothing")
    theta_at = (found, inner) if found.get("rope_theta") is not None else (config, outer)
    theta = positive_number(theta_at[0], "rope_theta", theta_at[1], _DEFAULT_THETA)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return RotaryEmbedding.Config(dim=head_dim, max_seq_len=max_seq_len, theta=theta)
    if kind != "llama3":
        raise InputError(f"{inner}rope_type", f"{kind!r} is not modelled", "known: default, llama3")
    context = "original_max_position_embeddings"
    context_at = (config, outer) if config.get(context) is not None else (found, inner)
    return RotaryEmbedding.Config(
        dim=head_dim,
        max_seq_len=max_seq_len,
        theta=theta,
        scaling="llama",
        scaling_factor=positive_number(found, "factor", inner),
        low_freq_factor=positive_number(found, "low_freq_factor", inner),
        high_freq_factor=positive_number(found, "high_freq_factor", inner),
        original_max_position_embeddings=positive_number(context_at[0], context, context_at[1]),
    )


def positive_number(table: Mapping[str, object], name: str, prefix: str, default: float | None = None) -> float:
    """Give a number above zero; null or absent means `default`. Errors say `prefix` and the name."""
    found = table.get(name)
    if found is None and default is not None:
        return default
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
        shown = "nothing" if found is None else repr(found)[:80]
        raise InputError(f"{prefix}{name}", f"expected a number above 0, found {shown}")
    return found
