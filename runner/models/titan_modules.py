"""All that the runner uses of torchtitan. No other file imports it: its next release is adapted to here."""
# ruff: noqa: E402 - torchtitan is imported while torch.compile is another

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return what `torch.compile` would, once it is called."""
    compiled = cache(lambda: _compile(function, **options))
    return lambda *args, **kwargs: compiled()(*args, **kwargs)


# torchtitan compiles its FlexAttention when it is imported, which imports inductor; nothing here uses it.
_compile = torch.compile
torch.compile = compile_later  # type: ignore[assignment]
try:
    import torchtitan.models.common.attention  # noqa: F401
finally:
    torch.compile = _compile

from torchtitan.models.common import CosSinRoPE, Embedding, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.module import Module, ModuleDict

__all__ = [
    "CosSinRoPE",
    "Embedding",
    "Linear",
    "Llama3Model",
    "Llama3TransformerBlock",
    "Module",
    "ModuleDict",
    "RMSNorm",
    "make_ffn_config",
    "make_gqa_config",
]
