"""What decoders on torchtitan's modules have in common: their shape, their names, and what is refused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.module import Module, ModuleDict

from manifests.errors import InputError
from manifests.models import ConfigReader, model_shape
from runner.families.attention import CausalAttention
from runner.families.rope import RotaryEmbedding, positive_number, rotary_config
from runner.loading.pieces import Piece

__all__ = ["ATTENTION", "MLP", "NORMS", "NO_INIT", "TitanFamily"]

# torchtitan wants an initialiser for every leaf; weights always come from a bundle.
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


class TitanFamily(ABC):
    """A decoder on torchtitan's modules; see `runner.families.Family`."""

    model: ClassVar[type[Decoder]]
    names: ClassVar[Mapping[str, str]]  # of a layer's modules and lone parameters
    stacked: ClassVar[Mapping[str, str]] = {}  # parameters of all experts; {} stands for an expert's number
    modelled: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # besides those below
    default_eps: ClassVar[float] = 1e-6
    default_theta: ClassVar[float] = 10000.0
    default_head: ClassVar[int | None] = None  # None: the hidden size over the number of heads

    def __init__(self, config: Mapping[str, object], *, max_seq_len: int, where: str = "config.json") -> None:
        plain = {name: found for name, found in config.items() if name != "quantization_config"}
        self.read = read = ConfigReader(plain, where)
        for field, allowed in {**_MODELLED, **self.modelled}.items():
            if (found := config.get(field)) is not None and found not in allowed:
                raise read.error(field, f"{found!r} is not modelled; expected {allowed[0]!r} or nothing")
        shape = model_shape(plain, where)
        self.architecture, self._shapes, self._extra = shape.architecture, shape.tensors, shape.optional
        self.modules = tuple(module for module in shape.modules if module not in shape.optional)
        self.hidden_size, self.vocab_size = read.count("hidden_size"), read.count("vocab_size")
        self.num_layers, self.max_seq_len = shape.num_layers, max_seq_len
        self._eps = positive_number(plain, "rms_norm_eps", f"{where}: ", self.default_eps)
        self.read_layers()

    @abstractmethod
    def read_layers(self) -> None:
        """Read what layers need from `read`, the config."""

    @abstractmethod
    def block(self, layer: int) -> TransformerBlock.Config:
        """Give the config of a layer, by its number in the whole model."""

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device, layers numbered as in the whole model.

        Raises:
            InputError: one of them is for multi-token prediction.
        """
        if extra := self._extra.intersection(modules):
            raise InputError(
                f"{self.read.where}: num_nextn_predict_layers",
                f"{min(extra)} predicts further tokens (MTP): torchtitan has no pipeline for such layers",
                "they can be packed; to train, pack again without them: num_nextn_predict_layers 0 in config.json, "
                "and --drop for each of their tensors",
            )
        layers = [module.removeprefix(_LAYERS) for module in modules if module.startswith(_LAYERS)]
        with torch.device("meta"):
            model: Decoder = self._model_config([int(layer) for layer in layers]).build()
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
        return Piece(fqn=fqn, shape=self._shapes[fqn], offset=offset, memory=memory)

    def rope(self) -> RotaryEmbedding.Config:
        return rotary_config(
            self.read.config,
            head_dim=self.head_dim,
            max_seq_len=self.max_seq_len,
            where=self.read.where,
            theta=self.default_theta,
        )

    @property
    def head_dim(self) -> int:
        return self.read.count("head_dim", self.default_head or self.hidden_size // self.num_heads)

    @property
    def num_heads(self) -> int:
        return self.read.count("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        return self.read.count("num_key_value_heads", self.num_heads)

    def attention(
        self, rope: RotaryEmbedding.Config, *, window: int | None = None, qk_norm: bool = False
    ) -> GQAttention.Config:
        """Attention in which groups of query heads share keys and values, without biases."""
        return make_gqa_config(
            dim=self.hidden_size,
            n_heads=self.num_heads,
            n_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            wqkv_param_init=NO_INIT,
            wo_param_init=NO_INIT,
            inner_attention=CausalAttention.Config(window=window),
            rope=rope,
            fuse_qkv=False,
            qk_norm=self.norm(self.head_dim) if qk_norm else None,
        )

    def norms(self) -> dict[str, RMSNorm.Config]:
        """The two norms of a layer."""
        return {name: self.norm(self.hidden_size) for name in NORMS}

    def mlp(self, ffn: int) -> FeedForward.Config:
        return make_ffn_config(dim=self.hidden_size, hidden_dim=ffn, w1_param_init=NO_INIT, w2w3_param_init=NO_INIT)

    def norm(self, width: int, eps: float | None = None) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=eps or self._eps, param_init=NO_INIT)

    def _model_config(self, layers: list[int]) -> Decoder.Config:
        width, vocab = self.hidden_size, self.vocab_size
        return self.model.Config(
            dim=width,
            vocab_size=vocab,
            tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=width, param_init=NO_INIT),
            norm=self.norm(width),
            lm_head=Linear.Config(in_features=width, out_features=vocab, param_init=NO_INIT),
            layers=[self.block(layer) for layer in layers],
        )


def _split(name: str) -> tuple[str, str]:
    """Cut a name of torchtitan's into the layer's name in files, empty outside layers, and the rest."""
    if not name.startswith("layers."):
        return "", name
    _, layer, part = name.split(".", 2)
    return f"{_LAYERS}{layer}.", part


_MODELLED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "pretraining_tp": (1,),
    "attention_dropout": (0.0,),
    "output_router_logits": (False,),  # the loss that balances experts needs every stage's logits
}
