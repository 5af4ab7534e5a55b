"""torchtitan's own trainer on the CPU, for benches and tests beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.components.metrics
import torchtitan.distributed.utils
import torchtitan.trainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _EMBEDDING_INIT, _NORM_INIT, _build_llama3_layers, _output_linear_init
from torchtitan.models.llama3.model import Llama3Model


def llama(config: Mapping[str, Any], *, fused: bool) -> Llama3Model.Config:
    """Return the config of a Llama from Hugging Face's; if fused, its query, key and value weights are one."""
    dim, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    rope = ComplexRoPE.Config(
        dim=dim // heads, max_seq_len=config["max_position_embeddings"], theta=config["rope_theta"], scaling="none"
    )
    layers = _build_llama3_layers(
        fuse_qkv=fused, n_layers=config["num_hidden_layers"], dim=dim, n_heads=heads,
        n_kv_heads=config["num_key_value_heads"], hidden_dim=config["intermediate_size"], rope=rope,
        attn_backend="flex",
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex_attention compiles for a minute
    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=_output_linear_init(dim)),
        layers=layers,
    )


class NoTokenizer(BaseTokenizer):
    """What the trainer asks for, although its data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 0


def run_on_cpu() -> None:
    """torchtitan takes the device of the machine's accelerator, or else CUDA's."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.device_type = "cpu"
        if name.startswith("torchtitan.") and getattr(module, "device_module", None) is torch.cuda:
            module.device_module = torch.cpu
    torchtitan.distributed.utils.set_pg_timeouts = lambda *_, **__: None  # its barrier names a device by number
    stats = SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    torchtitan.components.metrics.build_device_memory_monitor = lambda: monitor


def take_microbatches(schedule: Any) -> None:
    """Let a schedule's step take microbatches, as torchtitan calls it; that of torch 2.13 splits a batch itself."""

    def step(
        *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
    ) -> None:
        schedule._stage.has_backward = True
        schedule._stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedule.step = step
