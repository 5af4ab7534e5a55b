"""Llama on torchtitan's modules. Other architectures are on transformers', see docs/adr/0044."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from manifests.models.trainable import generic_entry
from runner.models.shrink import shrink
from runner.models.titan_fields import Rope, TitanFields, Yarn
from runner.models.titan_modules import (
    CosSinRoPE,
    Embedding,
    Linear,
    Llama3Model,
    Llama3TransformerBlock,
    Module,
    ModuleDict,
    RMSNorm,
    make_ffn_config,
    make_gqa_config,
)
from runner.tensors.local_shard import Piece

# torchtitan requires an initializer for every leaf; weights always come from a bundle.
_NO_INIT = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}

# Names within a layer: torchtitan's, and those in files.
_NAMES = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
_LAYERS = "model.layers."
_TINY_LENGTH = 64  # tokens of rows that a tiny model takes, more than a proof has


class TitanLlama(TitanFields):
    """A Llama on torchtitan's modules; see `runner.models.Family`."""

    hands_on_trees, row_inputs = False, ()

    def __init__(self, config: Mapping[str, object], *, max_seq_len: int, where: str = "config.json") -> None:
        super().__init__(config, where)
        self.max_seq_len = max_seq_len

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device, layers numbered as in the whole model."""
        layers = [module.removeprefix(_LAYERS) for module in modules if module.startswith(_LAYERS)]
        with torch.device("meta"):
            model: Llama3Model = self._model_config(len(layers)).build()
        model.tok_embeddings.padding_idx = self.padding_row
        model.layers = ModuleDict(dict(zip(layers, model.layers.values(), strict=True)))
        for name, module in _TOP.items():
            if module not in modules:
                setattr(model, name, None)
        stage: nn.Module = model
        return stage

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        for part in module.modules():
            if isinstance(part, Module):
                part._init_self_buffers(buffer_device=device)

    def to_hf(self, name: str) -> str:
        if not name.startswith("layers."):
            part, _, leaf = name.rpartition(".")
            return f"{_TOP[part]}.{leaf}"
        _, layer, inside = name.split(".", 2)
        part, _, leaf = inside.rpartition(".")
        return f"{_LAYERS}{layer}.{_NAMES[part]}.{leaf}"

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        fqn = self.to_hf(name)
        return (Piece(fqn=fqn, shape=self.shapes[fqn], offset=offset, memory=memory),)

    def padded_length(self, length: int, most: int) -> int:
        return most  # no RoPE of these modules depends on it

    def tiny(self) -> Self:
        """Return the family of a model of the same config, with all layers and small widths."""
        from runner.models.whole_model import with_defaults

        config = shrink(with_defaults(self.architecture, self.read.config), self.max_seq_len)
        small = {**config, "architectures": [self.architecture]}
        return type(self)(small, max_seq_len=_TINY_LENGTH, where=self.read.where)

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def reference(self) -> nn.Module:
        """Return transformers' model of the config with random weights, on the CPU."""
        from runner.models.generic import Generic

        entry = generic_entry(self.architecture)
        assert entry is not None, self.architecture
        return Generic(entry, self.read.config, max_seq_len=1, where=self.read.where).whole()

    def _model_config(self, num_layers: int) -> Llama3Model.Config:
        width, vocab = self.hidden_size, self.vocab_size
        return Llama3Model.Config(
            dim=width,
            vocab_size=vocab,
            tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init=_NO_INIT),
            norm=self._norm(),
            lm_head=Linear.Config(in_features=width, out_features=vocab, bias=False, param_init=_NO_INIT),
            layers=[self._block() for _ in range(num_layers)],
        )

    def _block(self) -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            attention_norm=self._norm(),
            ffn_norm=self._norm(),
            attention=make_gqa_config(
                dim=self.hidden_size,
                n_heads=self.num_heads,
                n_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                wqkv_param_init=_NO_INIT,
                wo_param_init=_NO_INIT,
                inner_attention=CausalAttention.Config(),
                rope=_rotary_config(self.rope, self.max_seq_len),
                fuse_qkv=False,
            ),
            feed_forward=make_ffn_config(
                dim=self.hidden_size, hidden_dim=self.ffn, w1_param_init=_NO_INIT, w2w3_param_init=_NO_INIT
            ),
        )

    def _norm(self) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=self.hidden_size, eps=self.eps, param_init=_NO_INIT)


class CausalAttention(Module):  # type: ignore[misc]
    """Causal attention on any device and in any dtype, under torchtitan's argument names.

    Shapes: (B, L, N, H); B = batch, L = tokens, N = heads, H = width of a head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert attention_masks is None, "the mask is always causal"
        q, k, v = (heads.transpose(1, 2) for heads in (q_BLNH, k_BLNH, v_BLNH))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


class RotaryEmbedding(CosSinRoPE):  # type: ignore[misc]
    """torchtitan's rotate-half RoPE with the frequencies of Llama 3.1, or of YaRN, so that Q and K need no permutation.

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


def _rotary_config(rope: Rope, max_seq_len: int) -> RotaryEmbedding.Config:
    rotary = RotaryEmbedding.Config(dim=rope.dim, max_seq_len=max_seq_len, theta=rope.theta, yarn=rope.yarn)
    if rope.llama3 is not None:
        rotary.scaling = "llama"
        rotary.scaling_factor = rope.llama3.factor
        rotary.low_freq_factor = rope.llama3.low_freq_factor
        rotary.high_freq_factor = rope.llama3.high_freq_factor
        rotary.original_max_position_embeddings = rope.llama3.context
    return rotary


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
    unscaled = 1 - ramp.clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - unscaled) + 1.0 / powers * unscaled
