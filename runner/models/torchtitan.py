"""What decoders on torchtitan's modules have in common: their shape, their names, and what is refused."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import torch
from torch import nn

from manifests.models.trainable import generic_entry
from runner.models.attention import CausalAttention, RotaryEmbedding, rotary_config
from runner.models.shrink import shrink
from runner.models.titan_fields import TitanFields
from runner.models.titan_modules import (
    Decoder,
    Embedding,
    FeedForward,
    GQAttention,
    Linear,
    Module,
    ModuleDict,
    RMSNorm,
    TokenChoiceTopKRouter,
    TransformerBlock,
    make_ffn_config,
    make_gqa_config,
)
from runner.tensors.local_shard import Piece

# torchtitan requires an initializer for every leaf; weights always come from a bundle.
NO_INIT = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}

# Names within a layer: torchtitan's, and those in files.
NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
}
MLP = {
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
_LAYERS = "model.layers."
_TINY_LENGTH = 64  # tokens of rows that a tiny model takes, more than a proof has


class TitanFamily(TitanFields):
    """A decoder on torchtitan's modules; see `runner.models.Family`."""

    model: ClassVar[type[Decoder]]
    names: ClassVar[Mapping[str, str]]  # of a layer's modules and lone parameters
    hands_on_trees, row_inputs = False, ()
    stacked: ClassVar[Mapping[str, str]] = {}  # parameters of all experts; {} stands for an expert's number

    def __init__(self, config: Mapping[str, object], *, max_seq_len: int, where: str = "config.json") -> None:
        super().__init__(config, where)
        self.max_seq_len = max_seq_len
        self.rotary = rotary_config(self.rope, max_seq_len=max_seq_len, kind=self.rotary_kind())

    def rotary_kind(self) -> type[RotaryEmbedding.Config]:
        return RotaryEmbedding.Config

    @abstractmethod
    def block(self, layer: int) -> TransformerBlock.Config:
        """Return the config of a layer, by its number in the whole model."""

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device, layers numbered as in the whole model."""
        self.check_modules(modules)
        layers = [module.removeprefix(_LAYERS) for module in modules if module.startswith(_LAYERS)]
        with torch.device("meta"):
            model: Decoder = self._model_config([int(layer) for layer in layers]).build()
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

    def routers(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return ((name, part) for name, part in module.named_modules() if isinstance(part, TokenChoiceTopKRouter))

    def to_hf(self, name: str) -> str:
        prefix, part = _split(name)
        if part in self.stacked:
            return prefix + self.stacked[part].format(0)
        if part in self.names:
            return prefix + self.names[part]
        part, _, leaf = part.rpartition(".")
        return f"{prefix}{(self.names if prefix else _TOP)[part]}.{leaf}"

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        prefix, part = _split(name)
        if part not in self.stacked:
            return (self.piece(self.to_hf(name), memory, offset),)
        first, *corner = offset
        return tuple(
            self.piece(prefix + self.stacked[part].format(expert), box, tuple(corner))
            for expert, box in enumerate(memory.unbind(), start=first)
        )

    def piece(self, fqn: str, memory: torch.Tensor, offset: tuple[int, ...]) -> Piece:
        return Piece(fqn=fqn, shape=self.shapes[fqn], offset=offset, memory=memory)

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
        family = Generic(entry, self.read.config, max_seq_len=1, where=self.read.where)
        family._config._experts_implementation = "eager"
        return family.whole()

    def attention(self, *, window: int | None = None, qk_norm: bool = False) -> GQAttention.Config:
        """Return the config of grouped-query attention without biases."""
        return make_gqa_config(
            dim=self.hidden_size,
            n_heads=self.num_heads,
            n_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            wqkv_param_init=NO_INIT,
            wo_param_init=NO_INIT,
            inner_attention=CausalAttention.Config(window=window),
            rope=self.rotary,
            fuse_qkv=False,
            qk_norm=self.norm(self.head_dim) if qk_norm else None,
        )

    def norms(self) -> dict[str, RMSNorm.Config]:
        """Return the configs of the two norms of a layer."""
        return {name: self.norm(self.hidden_size) for name in NORMS}

    def mlp(self, ffn: int) -> FeedForward.Config:
        return make_ffn_config(dim=self.hidden_size, hidden_dim=ffn, w1_param_init=NO_INIT, w2w3_param_init=NO_INIT)

    def norm(self, width: int, eps: float | None = None) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=eps or self.eps, param_init=NO_INIT)

    def _model_config(self, layers: list[int]) -> Decoder.Config:
        width, vocab = self.hidden_size, self.vocab_size
        return self.model.Config(
            dim=width,
            vocab_size=vocab,
            tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init=NO_INIT),
            norm=self.norm(width),
            lm_head=linear(width, vocab),
            layers=[self.block(layer) for layer in layers],
        )


def linear(
    inputs: int, outputs: int, *, bias: bool = False, kind: type[Linear.Config] = Linear.Config
) -> Linear.Config:
    return kind(in_features=inputs, out_features=outputs, bias=bias, param_init=NO_INIT)


def _split(name: str) -> tuple[str, str]:
    """Split a name of torchtitan's into the layer's name in files, empty outside layers, and the rest."""
    if not name.startswith("layers."):
        return "", name
    _, layer, part = name.split(".", 2)
    return f"{_LAYERS}{layer}.", part
