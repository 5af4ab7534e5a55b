"""What a Hugging Face config asks of a Llama on torchtitan's modules, read and checked whole. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from manifests.errors import InputError, ModelError
from manifests.jsontext import kind_of
from manifests.models import ConfigReader, model_shape

_DEFAULT_THETA = 10000.0
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "pretraining_tp": (1,),
    "attention_dropout": (0.0,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """How YaRN stretches a context."""

    factor: float
    beta_fast: float
    beta_slow: float
    context: float  # in tokens, before
    truncate: bool
    attention_factor: float  # of cosines and sines


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


class TitanFields:
    """The fields of a config that the family computes with."""

    def __init__(self, config: Mapping[str, object], where: str = "config.json") -> None:
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        self.read = read = ConfigReader(plain, where)
        for field, allowed in _SUPPORTED.items():
            if (value := config.get(field)) is not None and value not in allowed:
                problem = f"{value!r} is not supported; expected {allowed[0]!r} or nothing"
                raise read.error(field, problem, code="config.unsupported-value")
        shape = model_shape(plain, where)
        self.architecture, self.shapes, self.modules = shape.architecture, shape.tensors, shape.modules
        self.hidden_size, self.vocab_size = read.count("hidden_size"), read.count("vocab_size")
        self.padding_row = _padding_row(read, self.vocab_size)
        self.eps = _positive_number(plain, "rms_norm_eps", f"{where}: ", 1e-6)
        self.num_heads = read.count("num_attention_heads")
        self.num_kv_heads = read.count("num_key_value_heads", self.num_heads)
        self.head_dim = read.count("head_dim", self.hidden_size // self.num_heads)
        self.rope = _read_rope(plain, head_dim=self.head_dim, where=where)
        self.ffn = read.count("intermediate_size")


def _read_rope(config: Mapping[str, object], *, head_dim: int, where: str) -> Rope:
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
    theta = _positive_number(theta_at[0], "rope_theta", theta_at[1], _DEFAULT_THETA)
    name = fields.get("rope_type", fields.get("type", "default"))
    if name == "default":
        return Rope(dim=head_dim, theta=theta)
    if name not in ("llama3", "yarn"):
        raise _refused(f"{inner}rope_type", f"{name!r} is not supported", "known: default, llama3, yarn")
    context = "original_max_position_embeddings"
    context_at = (config, outer) if config.get(context) is not None else (fields, inner)
    original = _positive_number(context_at[0], context, context_at[1])
    if name == "yarn":
        return Rope(dim=head_dim, theta=theta, yarn=_read_yarn(fields, inner, original))
    llama3 = Llama3(
        factor=_positive_number(fields, "factor", inner),
        low_freq_factor=_positive_number(fields, "low_freq_factor", inner),
        high_freq_factor=_positive_number(fields, "high_freq_factor", inner),
        context=original,
    )
    return Rope(dim=head_dim, theta=theta, llama3=llama3)


def _read_yarn(fields: Mapping[str, object], prefix: str, context: float) -> Yarn:
    factor, truncate = _positive_number(fields, "factor", prefix), fields.get("truncate", True)
    if not isinstance(truncate, bool):
        raise _refused(f"{prefix}truncate", f"expected true or false, found {kind_of(truncate)}")
    mscale, all_dim = (
        _positive_number(fields, name, prefix) if fields.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")
    )
    usual = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return Yarn(
        factor=factor,
        beta_fast=_positive_number(fields, "beta_fast", prefix, 32.0),
        beta_slow=_positive_number(fields, "beta_slow", prefix, 1.0),
        context=context,
        truncate=truncate,
        attention_factor=_positive_number(fields, "attention_factor", prefix, usual),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _positive_number(table: Mapping[str, object], name: str, prefix: str, default: float | None = None) -> float:
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


def _padding_row(read: ConfigReader, vocab_size: int) -> int | None:
    """Return the row of the embedding that gets no gradient: that of `pad_token_id`, counted from the end if negative.

    Source: transformers builds `nn.Embedding(…, padding_idx=config.pad_token_id)`.
    """
    token = read.config.get("pad_token_id")
    if token is None:
        return None
    if type(token) is not int or not -vocab_size <= token < vocab_size:
        raise read.error(
            "pad_token_id",
            f"expected an integer within the vocabulary of {vocab_size}, found {repr(token)[:80]}",
            "null if the model has no padding token",
            code="config.pad-token",
        )
    return token % vocab_size
