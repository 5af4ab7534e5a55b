"""What a Hugging Face config says of rotary position embeddings, read and checked. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from manifests.errors import InputError, ModelError
from manifests.jsontext import kind_of

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3:
    """How Llama 3.1 stretches a context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    context: float  # in tokens, before


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One rotary embedding of a model: of `dim` values of each head, plain or stretched."""

    dim: int
    theta: float
    llama3: Llama3 | None = None
    yarn: Yarn | None = None


def read_rope(config: Mapping[str, object], *, head_dim: int, where: str, theta: float = _DEFAULT_THETA) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    if head_dim % 2:
        raise _refused(f"{where}: head_dim", f"expected an even width for RoPE, found {head_dim}")
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    fields = config.get(field) or {}
    if not isinstance(fields, Mapping):
        raise _refused(f"{where}: {field}", f"expected an object, found {kind_of(fields)}")
    outer, inner = f"{where}: ", f"{where}: {field}."
    for table, prefix in ((config, outer), (fields, inner)):
        if table.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise _refused(f"{prefix}partial_rotary_factor", "is not supported; expected 1.0 or nothing")
    if kinds := sorted(name for name, value in fields.items() if isinstance(value, Mapping)):
        raise _refused(f"{inner}{kinds[0]}", "is not supported", "all layers have one RoPE")
    theta_at = (fields, inner) if fields.get("rope_theta") is not None else (config, outer)
    theta = positive_number(theta_at[0], "rope_theta", theta_at[1], theta)
    name = fields.get("rope_type", fields.get("type", "default"))
    if name == "default":
        return Rope(dim=head_dim, theta=theta)
    if name not in ("llama3", "yarn"):
        raise _refused(f"{inner}rope_type", f"{name!r} is not supported", "known: default, llama3, yarn")
    context = "original_max_position_embeddings"
    context_at = (config, outer) if config.get(context) is not None else (fields, inner)
    original = positive_number(context_at[0], context, context_at[1])
    if name == "yarn":
        return Rope(dim=head_dim, theta=theta, yarn=_read_yarn(fields, inner, original))
    llama3 = Llama3(
        factor=positive_number(fields, "factor", inner),
        low_freq_factor=positive_number(fields, "low_freq_factor", inner),
        high_freq_factor=positive_number(fields, "high_freq_factor", inner),
        context=original,
    )
    return Rope(dim=head_dim, theta=theta, llama3=llama3)


def _read_yarn(fields: Mapping[str, object], prefix: str, context: float) -> Yarn:
    factor, truncate = positive_number(fields, "factor", prefix), fields.get("truncate", True)
    if not isinstance(truncate, bool):
        raise _refused(f"{prefix}truncate", f"expected true or false, found {kind_of(truncate)}")
    mscale, all_dim = (
        positive_number(fields, name, prefix) if fields.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")
    )
    usual = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return Yarn(
        factor=factor,
        beta_fast=positive_number(fields, "beta_fast", prefix, 32.0),
        beta_slow=positive_number(fields, "beta_slow", prefix, 1.0),
        context=context,
        truncate=truncate,
        attention_factor=positive_number(fields, "attention_factor", prefix, usual),
        mscale_all_dim=all_dim,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def positive_number(table: Mapping[str, object], name: str, prefix: str, default: float | None = None) -> float:
    """Return a number above zero; null or absent means `default`. Errors say `prefix` and the name."""
    number = table.get(name)
    if number is None and default is not None:
        return default
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= sys.float_info.max:
        shown = "nothing" if number is None else repr(number)[:80]
        raise _refused(f"{prefix}{name}", f"expected a number above 0, found {shown}")
    return number


def _refused(where: str, problem: str, hint: str = "") -> InputError:
    return ModelError(where, problem, hint, code="config.unsupported-rope")
