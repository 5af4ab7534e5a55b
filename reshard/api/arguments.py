"""Errors of the Python API name parameters where those of the command name flags."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from manifests.errors import UserError

__all__ = ["names_flags", "names_parameters"]

P = ParamSpec("P")
R = TypeVar("R")

_FLAG = re.compile(r"(?<![\w/-])--([a-z][a-z-]*)")
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
    "loss-chunk": "assumed.loss_chunk",
    "memory-limit": "assumed.memory_limit",
    "merge-slices": "conversion.merge_slices",
    "microbatch": "assumed.microbatch",
    "microbatches": "assumed.num_microbatches",
    "norms": "with_norms",
    "schedule": "assumed.schedule",
    "seq-len": "assumed.seq_len",
    "stage": "stages",
    "tp": "assumed.tensor",
}


def names_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's errors name its parameters instead of the command's flags."""
    parameters = inspect.signature(function).parameters

    def parameter(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return name if name in parameters else _NAMES.get(flag[1], flag[0])

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            texts = error.where, error.problem, error.hint
            error.where, error.problem, error.hint = (_FLAG.sub(parameter, text) for text in texts)
            raise

    return call


def names_flags(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of the API as the command calls it, with errors that name flags."""
    plain: Callable[P, R] = inspect.unwrap(function)
    return plain
