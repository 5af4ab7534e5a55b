"""GPT-OSS on torchtitan's modules: attention sinks, windows in every other layer, experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu

from runner.families.attention import CausalAttention
from runner.families.experts import Chosen, grouped_product, local, moe_config, tp_degree
from runner.families.rope import RotaryEmbedding, positive_number, rotary_config
from runner.families.titan import ATTENTION, NO_INIT, NORMS, TitanFamily
from runner.families.windows import windows_of
from runner.loading.pieces import Piece

__all__ = ["GptOss"]

_DEFAULT_WINDOW = 128  # GptOssConfig, as the rest
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULT_ALPHA, _DEFAULT_LIMIT = 1.702, 7.0
_EXPERTS = "moe.routed_experts.inner_experts"


class _Router(TokenChoiceTopKRouter):  # type: ignore[misc]
    """The largest logits, and the softmax of these alone. Source: transformers 5.23, `GptOssTopKRouter`."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):  # type: ignore[misc]
        pass

    def forward(self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None) -> Chosen:
        logits = self.gate(x_BLD)
        largest, chosen = logits.topk(self.top_k, dim=-1)
        return largest.softmax(-1), chosen, logits


class _Experts(GptOssGroupedExperts):  # type: ignore[misc]
    """torchtitan's experts in the dtype of their weights. Shapes: as `runner.families.experts.Experts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):  # type: ignore[misc]
        alpha: float = _DEFAULT_ALPHA

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.alpha = config.alpha

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        counts = num_tokens_per_expert_E

        def of_each_token(bias: torch.Tensor) -> torch.Tensor:
            return local(bias).repeat_interleave(counts, dim=0, output_size=x_RD.shape[0])

        hidden = grouped_product(x_RD, local(self.mlp1_weight_EGD), counts) + of_each_token(self.mlp1_bias_EG)
        hidden = swiglu(hidden, alpha=self.alpha, limit=self.swiglu_limit)
        out = grouped_product(hidden, local(self.mlp2_weight_EDF), counts)
        # Ranks of tensor parallelism add up their outputs.
        bias = ScaleBiasForward.apply(of_each_token(self.mlp2_bias_ED), tp_degree(self.mlp2_bias_ED), out.dtype)
        summed: torch.Tensor = out + bias
        return summed


class GptOss(TitanFamily):
    """`GptOssForCausalLM`. Files hold the matrices of experts transposed."""

    model = GptOssModel
    names: ClassVar[Mapping[str, str]] = {
        **NORMS,
        **ATTENTION,
        "attention.sinks": "self_attn.sinks",
        "moe.router.gate": "mlp.router",
        f"{_EXPERTS}.mlp1_weight_EGD": "mlp.experts.gate_up_proj",
        f"{_EXPERTS}.mlp1_bias_EG": "mlp.experts.gate_up_proj_bias",
        f"{_EXPERTS}.mlp2_weight_EDF": "mlp.experts.down_proj",
        f"{_EXPERTS}.mlp2_bias_ED": "mlp.experts.down_proj_bias",
    }
    modelled: ClassVar[Mapping[str, tuple[object, ...]]] = {"attention_bias": (True, False)}
    default_eps = 1e-5
    default_theta = 150000.0
    default_head = 64

    def read_layers(self) -> None:
        prefix = f"{self.read.where}: "
        self._rope, self._bias = self.rope(), self.read.flag("attention_bias", True)
        self._alpha = positive_number(self.read.config, "swiglu_alpha", prefix, _DEFAULT_ALPHA)
        self._limit = positive_number(self.read.config, "swiglu_limit", prefix, _DEFAULT_LIMIT)
        window: int | None = None
        if "sliding_window" not in self.read.config or self.read.has("sliding_window"):
            window = self.read.count("sliding_window", _DEFAULT_WINDOW)
        self._windows = windows_of(self.read, window, [layer % 2 == 0 for layer in range(self.num_layers)])

    def rope(self) -> RotaryEmbedding.Config:
        config = dict(self.read.config)
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config["rope_parameters"] = _DEFAULT_ROPE
        return rotary_config(
            config,
            head_dim=self.head_dim,
            max_seq_len=self.max_seq_len,
            where=self.read.where,
            theta=self.default_theta,
        )

    def block(self, layer: int) -> GptOssTransformerBlock.Config:
        return GptOssTransformerBlock.Config(
            **self.norms(), attention=self._attention(self._windows[layer]), moe=self._moe()
        )

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        if name.endswith(("mlp1_weight_EGD", "mlp2_weight_EDF")):
            expert, row, column = offset
            return (self.piece(self.to_hf(name), memory.transpose(1, 2), (expert, column, row)),)
        return super().pieces(name, memory, offset)

    def _attention(self, window: int | None) -> Attention.Config:
        width, head = self.hidden_size, self.head_dim
        linear: dict[str, Any] = {"bias": self._bias, "param_init": NO_INIT}
        queries, keys = self.num_heads * head, self.num_kv_heads * head
        return Attention.Config(
            n_heads=self.num_heads,
            n_kv_heads=self.num_kv_heads,
            head_dim=head,
            dim=width,
            qkv_linear=QKVLinear.Config(
                head_dim=head,
                wq=Linear.Config(in_features=width, out_features=queries, **linear),
                wkv=Linear.Config(in_features=width, out_features=keys, **linear),
            ),
            wo=Linear.Config(in_features=queries, out_features=width, **linear),
            sliding_window_size=window,
            inner_attention=CausalAttention.Config(window=window),
            rope=self._rope,
            param_init={"sinks": nn.init.zeros_},
        )

    def _moe(self) -> MoE.Config:
        read, width, count = self.read, self.hidden_size, self.read.count("num_local_experts")
        router = _Router.Config(
            num_experts=count,
            gate=Linear.Config(in_features=width, out_features=count, bias=True, param_init=NO_INIT),
            top_k=read.count("num_experts_per_tok"),
        )
        experts = _Experts.Config(
            dim=width,
            hidden_dim=read.count("intermediate_size"),
            num_experts=count,
            alpha=self._alpha,
            swiglu_limit=self._limit,
        )
        return moe_config(router, experts)
