"""Rotary position embeddings as Hugging Face computes them, so that Q and K need no permutation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torchtitan.models.common import CosSinRoPE

from manifests.errors import InputError
from manifests.jsontext import kind_of

__all__ = ["InterleavedRotaryEmbedding", "RotaryEmbedding", "Yarn", "positive_number", "rotary_config"]

_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """How YaRN stretches a context; `mscale_all_dim` is 0 where the config has none."""

    factor: float
    beta_fast: float
    beta_slow: float
    context: float  # in tokens, before
    truncate: bool
    attention_factor: float  # of cosines and sines
    mscale_all_dim: float = 0.0

    @property
    def score_factor(self) -> float:
        """What DeepSeek-V3 multiplies the scale of its scores with."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


class RotaryEmbedding(CosSinRoPE):  # type: ignore[misc]
    """torchtitan's rotate-half RoPE with the frequencies of Llama 3.1, or of YaRN.

    torchtitan's own YaRN is left alone: its layers fold a factor into the scale of their scores.

    Source: transformers 5.23, `modeling_rope_utils.py`, `_compute_llama3_parameters`, `_compute_yarn_parameters`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        yarn: Yarn | None = None

    def _precompute_cache(self) -> torch.Tensor:
        """Give cosines and sines of every position: (max_seq_len, 2 x dim), float32."""
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
    """The same for queries and keys whose pairs lie beside each other; they come out with the halves apart."""

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
    config: Mapping[str, object],
    *,
    head_dim: int,
    max_seq_len: int,
    where: str,
    theta: float = _DEFAULT_THETA,
    kind: type[RotaryEmbedding.Config] = RotaryEmbedding.Config,
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
    if kinds := sorted(name for name, value in found.items() if isinstance(value, Mapping)):
        raise InputError(f"{inner}{kinds[0]}", "is not modelled", "all layers have one RoPE")
    theta_at = (found, inner) if found.get("rope_theta") is not None else (config, outer)
    theta = positive_number(theta_at[0], "rope_theta", theta_at[1], theta)
    rotary = kind(dim=head_dim, max_seq_len=max_seq_len, theta=theta)
    name = found.get("rope_type", found.get("type", "default"))
    if name == "default":
        return rotary
    if name not in ("llama3", "yarn"):
        raise InputError(f"{inner}rope_type", f"{name!r} is not modelled", "known: default, llama3, yarn")
    context = "original_max_position_embeddings"
    context_at = (config, outer) if config.get(context) is not None else (found, inner)
    if name == "yarn":
        rotary.yarn = _read_yarn(found, inner, positive_number(context_at[0], context, context_at[1]))
        return rotary
    rotary.scaling = "llama"
    rotary.scaling_factor = positive_number(found, "factor", inner)
    rotary.low_freq_factor = positive_number(found, "low_freq_factor", inner)
    rotary.high_freq_factor = positive_number(found, "high_freq_factor", inner)
    rotary.original_max_position_embeddings = positive_number(context_at[0], context, context_at[1])
    return rotary


def _read_yarn(found: Mapping[str, object], prefix: str, context: float) -> Yarn:
    factor, truncate = positive_number(found, "factor", prefix), found.get("truncate", True)
    if not isinstance(truncate, bool):
        raise InputError(f"{prefix}truncate", f"expected true or false, found {kind_of(truncate)}")
    mscale, all_dim = (
        positive_number(found, name, prefix) if found.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")
    )
    usual = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return Yarn(
        factor=factor,
        beta_fast=positive_number(found, "beta_fast", prefix, 32.0),
        beta_slow=positive_number(found, "beta_slow", prefix, 1.0),
        context=context,
        truncate=truncate,
        attention_factor=positive_number(found, "attention_factor", prefix, usual),
        mscale_all_dim=all_dim,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def positive_number(table: Mapping[str, object], name: str, prefix: str, default: float | None = None) -> float:
    """Give a number above zero; null or absent means `default`. Errors say `prefix` and the name."""
    found = table.get(name)
    if found is None and default is not None:
        return default
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
        shown = "nothing" if found is None else repr(found)[:80]
        raise InputError(f"{prefix}{name}", f"expected a number above 0, found {shown}")
    return found
