"""Errors of the Python API name parameters where those of the command name flags."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from manifests.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

# What a text is taken apart into: a command line or quoted text, which stay as they are; a flag, perhaps with a value.
_PIECE = re.compile(
    r"(?<![\w/.-])(?:reshard|runner|hf|python|vllm) [a-z-][^;\n]*"
    r"|(?<!\w)'[^'\n]*'"
    r"|(?<![\w/-])--(?P<flag>[a-z][a-z-]*)(?!\.?[\w-])(?: (?!--)(?P<value>[^\s,;:)]+))?"
)
_WHERE = re.compile(r"--(?P<flag>[a-z][a-z-]*)(?: (?P<value>.+))?", re.DOTALL)
# Flags that are not called like a parameter.
_NAMES = {
    "ac": "assumed.recompute",
    "ask-password": "password",
    "bytes": "reads_bytes",
    "cost": "assumed.measured",
    "dp-replicate": "assumed.replicate",
    "dp-shard": "assumed.shard",
    "dequantize": "conversion.dequantize",
    "dtype": "conversion.dtype",
    "dtype-policy": "assumed.policy",
    "drop": "drop",  # of `pack`, also where another function says to pack again
    "for": "names",
    "loss-chunk": "assumed.loss_chunk",
    "gpu-memory": "assumed.memory_limit",
    "merge-slices": "conversion.merge_slices",
    "microbatch": "assumed.microbatch",
    "microbatches": "assumed.num_microbatches",
    "norms": "with_norms",
    "schedule": "assumed.schedule",
    "seq-len": "assumed.seq_len",
    "stage": "stages",
    "tp": "assumed.tensor",
}
# Flags without a value, whose parameters are True.
_SWITCHES = frozenset(
    ("bytes", "force", "merge-slices", "norms", "public", "quick", "strict-megatron", "values", "verify-source",
     "virtual", "weights-only")
)  # fmt: skip
# What follows a flag and is its value, not the next word.
_VALUES = {
    "cost": r"\S+\.json",
    "dequantize": "bf16|fp32",
    "digests": "write|verify",
    "drop": r"(?!out\b)\S+",
    "dtype": "source|fp32|bf16|fp16",
    "for": "hf|torchtitan|pipeline",
    "layout": r"\S+=\S+",
    "model": r"\S+\.toml",
    "out": r"\w+://\S+",
    "to": "hf|dcp|deepspeed|universal|megatron",
}


def names_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's errors name its parameters instead of the command's flags.

    `where` becomes the parameter, `force`; in a sentence, "replace it with --force" becomes "with `force=True`", and
    "pack it with --out hf://org/name" becomes "with `out='hf://org/name'`". Command lines stay whole, and flags that no
    parameter has, too.
    """
    parameters = inspect.signature(function).parameters

    def parameter(flag: str) -> str | None:
        name = flag.replace("-", "_")
        return name if name in parameters else _NAMES.get(flag, name if flag in _SWITCHES else None)

    def in_sentence(piece: re.Match[str]) -> str:
        flag, value = piece["flag"], piece["value"]
        name = parameter(flag) if flag else None
        if name is None:
            return piece[0]
        if flag in _SWITCHES:
            name = f"{name}=True"
        if value is None or re.fullmatch(_VALUES.get(flag, "(?!)"), value) is None:
            return f"`{name}`" if value is None else f"`{name}` {value}"
        return f"`{_with_value(name, value)}`"

    def in_place(where: str) -> str:
        found = _WHERE.fullmatch(where)
        name = parameter(found["flag"]) if found else None
        if found is None or name is None:
            return _PIECE.sub(in_sentence, where)
        return name if found["value"] is None else _with_value(name, found["value"])

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            error.where = in_place(error.where)
            error.problem, error.hint = (_PIECE.sub(in_sentence, text) for text in (error.problem, error.hint))
            raise

    return call


def _with_value(name: str, value: str) -> str:
    """Return how a parameter gets the value that its flag has; times that a file has are read by the caller."""
    if name == "assumed.measured":
        return name
    return f"{name}={[value] if name == 'drop' else value!r}"


def names_flags(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of the API as the command calls it, with errors that name flags."""
    plain: Callable[P, R] = inspect.unwrap(function)
    return plain
