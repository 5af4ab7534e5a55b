"""GPT-OSS on torchtitan's modules: attention sinks, windows in every other layer, experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from runner.models.attention import CausalAttention
from runner.models.experts import Chosen, grouped_product, local, moe_config, tp_degree
from runner.models.titan_fields import GptOssFields
from runner.models.titan_modules import (
    GptOssAttention,
    GptOssGroupedExperts,
    GptOssModel,
    GptOssTransformerBlock,
    Linear,
    MoE,
    QKVLinear,
    ScaleBiasForward,
    TokenChoiceTopKRouter,
    swiglu,
)
from runner.models.torchtitan import ATTENTION, NO_INIT, NORMS, TitanFamily
from runner.tensors.local_shard import Piece

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
    """torchtitan's experts in the dtype of their weights. Shapes: as `runner.models.experts.Experts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):  # type: ignore[misc]
        alpha: float

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
        # Tensor-parallel ranks sum their outputs.
        bias = ScaleBiasForward.apply(of_each_token(self.mlp2_bias_ED), tp_degree(self.mlp2_bias_ED), out.dtype)
        summed: torch.Tensor = out + bias
        return summed


class GptOss(GptOssFields, TitanFamily):
    """`GptOssForCausalLM`. The matrices of experts are transposed in files."""

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

    def block(self, layer: int) -> GptOssTransformerBlock.Config:
        return GptOssTransformerBlock.Config(
            **self.norms(), attention=self._attention(self.windows[layer]), moe=self._moe()
        )

    def pieces(self, name: str, memory: torch.Tensor, offset: tuple[int, ...]) -> tuple[Piece, ...]:
        if name.endswith(("mlp1_weight_EGD", "mlp2_weight_EDF")):
            expert, row, column = offset
            return (self.piece(self.to_hf(name), memory.transpose(1, 2), (expert, column, row)),)
        return super().pieces(name, memory, offset)

    def _attention(self, window: int | None) -> GptOssAttention.Config:
        width, head = self.hidden_size, self.head_dim
        linear: dict[str, Any] = {"bias": self.has_bias, "param_init": NO_INIT}
        queries, keys = self.num_heads * head, self.num_kv_heads * head
        return GptOssAttention.Config(
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
            rope=self.rotary,
            param_init={"sinks": nn.init.zeros_},
        )

    def _moe(self) -> MoE.Config:
        width, count = self.hidden_size, self.num_experts
        router = _Router.Config(
            num_experts=count,
            gate=Linear.Config(in_features=width, out_features=count, bias=True, param_init=NO_INIT),
            top_k=self.top_k,
        )
        experts = _Experts.Config(
            dim=width,
            hidden_dim=self.ffn,
            num_experts=count,
            alpha=self.alpha,
            swiglu_limit=self.limit,
        )
        return moe_config(router, experts)
