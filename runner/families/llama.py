"""`LlamaForCausalLM` (Llama 2, 3, 3.1, 3.2) on torchtitan's Llama 3 modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.llama3.model import (
    Llama3Model,
    Llama3TransformerBlock,
)
from torchtitan.protocols.module import Module, ModuleDict

from manifests.errors import InputError
from manifests.models import ConfigReader, model_shape
from runner.families.rope import positive_number, rotary_config
from runner.pieces import Piece

__all__ = ["CausalAttention", "Llama"]

_DEFAULT_EPS = 1e-6
_TOP = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "lm_head"}
_BLOCK = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_LAYERS = "model.layers."
# torchtitan wants an initialiser for every leaf; weights always come from a bundle.
_NO_INIT = {"weight": nn.init.zeros_}


class CausalAttention(Module):  # type: ignore[misc]
    """Causal attention that runs on any device, under torchtitan's argument names.

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
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return attended.transpose(1, 2)


class Llama:
    """The Llama family; see `runner.families.Family`."""

    def __init__(self, config: Mapping[str, object], *, max_seq_len: int, where: str = "config.json") -> None:
        _refuse_unmodelled(config, where)
        read, shape = ConfigReader(config, where), model_shape(config, where)
        self.architecture, self.modules = shape.architecture, shape.modules
        self.hidden_size, self.vocab_size = read.count("hidden_size"), read.count("vocab_size")
        self._heads = read.count("num_attention_heads")
        self._kv_heads = read.count("num_key_value_heads", self._heads)
        self._head_dim = read.count("head_dim", self.hidden_size // self._heads)
        self._ffn_size = read.count("intermediate_size")
        self._eps = positive_number(config, "rms_norm_eps", f"{where}: ", _DEFAULT_EPS)
        self._rope = rotary_config(config, head_dim=self._head_dim, max_seq_len=max_seq_len, where=where)
        self._shapes = shape.tensors
        self._to_hf = {_name_of(fqn): fqn for fqn in shape.tensors}

    def build(self, modules: tuple[str, ...]) -> nn.Module:
        """Build these modules, and no others, on the meta device, layers numbered as in the whole model."""
        layers = [module.removeprefix(_LAYERS) for module in modules if module.startswith(_LAYERS)]
        with torch.device("meta"):
            model: Llama3Model = self._model_config(len(layers)).build()
        model.layers = ModuleDict(dict(zip(layers, model.layers.values(), strict=True)))
        for module, name in _TOP.items():
            if module not in modules:
                setattr(model, name, None)
        stage: nn.Module = model
        return stage

    def init_buffers(self, module: nn.Module, device: torch.device) -> None:
        for part in module.modules():
            if isinstance(part, Module):
                part._init_self_buffers(buffer_device=device)

    def to_hf(self, name: str) -> str:
        return self._to_hf[name]

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        fqn = self._to_hf[name]
        return (Piece(fqn=fqn, shape=self._shapes[fqn], offset=offset, memory=memory),)

    def _model_config(self, num_layers: int) -> Llama3Model.Config:
        return Llama3Model.Config(
            dim=self.hidden_size,
            vocab_size=self.vocab_size,
            tok_embeddings=Embedding.Config(
                num_embeddings=self.vocab_size, embedding_dim=self.hidden_size, param_init=_NO_INIT
            ),
            norm=self._norm_config(),
            lm_head=Linear.Config(in_features=self.hidden_size, out_features=self.vocab_size, param_init=_NO_INIT),
            layers=[self._block_config() for _ in range(num_layers)],
        )

    def _block_config(self) -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            attention_norm=self._norm_config(),
            ffn_norm=self._norm_config(),
            attention=make_gqa_config(
                dim=self.hidden_size,
                n_heads=self._heads,
                n_kv_heads=self._kv_heads,
                head_dim=self._head_dim,
                wqkv_param_init=_NO_INIT,
                wo_param_init=_NO_INIT,
                inner_attention=CausalAttention.Config(),
                rope=self._rope,
                fuse_qkv=False,
            ),
            feed_forward=make_ffn_config(
                dim=self.hidden_size,
                hidden_dim=self._ffn_size,
                w1_param_init=_NO_INIT,
                w2w3_param_init=_NO_INIT,
            ),
        )

    def _norm_config(self) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=self.hidden_size, eps=self._eps, param_init=_NO_INIT)


def _name_of(fqn: str) -> str:
    module, _, leaf = fqn.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{leaf}"
    layer, _, part = module.removeprefix(_LAYERS).partition(".")
    return f"layers.{layer}.{_BLOCK[part]}.{leaf}"


def _refuse_unmodelled(config: Mapping[str, object], where: str) -> None:
    """Refuse what torchtitan's Llama would compute otherwise, or not at all.

    Raises:
        InputError: naming the field.
    """
    for field, allowed in _MODELLED.items():
        found = config.get(field)
        if found is not None and found not in allowed:
            raise InputError(f"{where}: {field}", f"{found!r} is not modelled; expected {allowed[0]!r} or nothing")


_MODELLED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "attention_dropout": (0.0,),
}
