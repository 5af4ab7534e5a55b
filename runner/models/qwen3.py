"""Qwen3, dense and with experts, on torchtitan's Qwen3 modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from runner.models.experts import Experts, SoftmaxRouter, moe_config
from runner.models.titan_fields import Qwen3Fields, Qwen3MoeFields
from runner.models.titan_modules import Linear, MoE, Qwen3Model, Qwen3TransformerBlock
from runner.models.torchtitan import ATTENTION, MLP, NO_INIT, NORMS, TitanFamily


class Qwen3(Qwen3Fields, TitanFamily):
    """`Qwen3ForCausalLM`."""

    model = Qwen3Model
    names: ClassVar[Mapping[str, str]] = {
        **NORMS,
        **ATTENTION,
        **MLP,
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    }

    def block(self, layer: int) -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            **self.norms(),
            attention=self.attention(window=self.windows[layer], qk_norm=True),
            feed_forward=self.mlp(self.ffn),
        )


class Qwen3Moe(Qwen3MoeFields, Qwen3):
    """`Qwen3MoeForCausalLM`.

    Layers named by `mlp_only_layers`, and all but every `decoder_sparse_step`-th, are dense.
    """

    names: ClassVar[Mapping[str, str]] = {**Qwen3.names, "moe.router.gate": "mlp.gate"}
    stacked: ClassVar[Mapping[str, str]] = {
        f"moe.routed_experts.inner_experts.{name}": f"mlp.experts.{{}}.{part}.weight"
        for name, part in (("w1_EFD", "gate_proj"), ("w3_EFD", "up_proj"), ("w2_EDF", "down_proj"))
    }

    def block(self, layer: int) -> Qwen3TransformerBlock.Config:
        config = super().block(layer)
        if self.is_sparse(layer):
            config.feed_forward, config.moe = None, self._moe()
        return config

    def _moe(self) -> MoE.Config:
        count = self.num_experts
        gate = Linear.Config(in_features=self.hidden_size, out_features=count, param_init=NO_INIT)
        router = SoftmaxRouter.Config(
            num_experts=count,
            gate=gate,
            top_k=self.top_k,
            score_func="softmax",
            route_norm=self.is_normed,
        )
        experts = Experts.Config(dim=self.hidden_size, hidden_dim=self.expert_ffn, num_experts=count)
        return moe_config(router, experts)
