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
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.deepseek_v3.model import Attention as DeepSeekV3Attention
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model, DeepSeekV3TransformerBlock
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.models.gpt_oss.model import GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module, ModuleDict

__all__ = [
    "CosSinRoPE",
    "Decoder",
    "DeepSeekV3Attention",
    "DeepSeekV3Model",
    "DeepSeekV3TransformerBlock",
    "Embedding",
    "FeedForward",
    "GQAttention",
    "GptOssAttention",
    "GptOssGroupedExperts",
    "GptOssModel",
    "GptOssTransformerBlock",
    "GroupedExperts",
    "Linear",
    "Llama3Model",
    "Llama3TransformerBlock",
    "LocalTokenDispatcher",
    "MoE",
    "Module",
    "ModuleDict",
    "QKVLinear",
    "Qwen3Model",
    "Qwen3TransformerBlock",
    "RMSNorm",
    "RoutedExperts",
    "TokenChoiceTopKRouter",
    "TransformerBlock",
    "make_ffn_config",
    "make_gqa_config",
    "swiglu",
]
