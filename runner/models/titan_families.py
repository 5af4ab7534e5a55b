"""The decoders on torchtitan's modules: the names of their parameters in files, and the config of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from runner.models.attention import CausalAttention, InterleavedRotaryEmbedding, RotaryEmbedding
from runner.models.experts import (
    ClampedExperts,
    Experts,
    FloatLinear,
    LargestLogitsRouter,
    SigmoidRouter,
    SoftmaxRouter,
    SteeredMoE,
    moe_config,
)
from runner.models.titan_fields import (
    DeepSeekV3Fields,
    GptOssFields,
    LlamaFields,
    MistralFields,
    Qwen3Fields,
    Qwen3MoeFields,
)
from runner.models.titan_modules import (
    DeepSeekV3Attention,
    DeepSeekV3Model,
    DeepSeekV3TransformerBlock,
    GptOssAttention,
    GptOssModel,
    GptOssTransformerBlock,
    Llama3Model,
    Llama3TransformerBlock,
    MoE,
    QKVLinear,
    Qwen3Model,
    Qwen3TransformerBlock,
)
from runner.models.torchtitan import ATTENTION, MLP, NORMS, TitanFamily, linear
from runner.tensors.local_shard import Piece

_EXPERTS = "moe.routed_experts.inner_experts"
_STACKED: Mapping[str, str] = {
    f"{_EXPERTS}.{name}": f"mlp.experts.{{}}.{part}.weight"
    for name, part in (("w1_EFD", "gate_proj"), ("w3_EFD", "up_proj"), ("w2_EDF", "down_proj"))
}
_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says: `DeepseekV3RMSNorm`


class Llama(LlamaFields, TitanFamily):
    """`LlamaForCausalLM`: Llama 2, 3, 3.1, 3.2."""

    model = Llama3Model
    names: ClassVar[Mapping[str, str]] = {**NORMS, **ATTENTION, **MLP}

    def block(self, layer: int) -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            **self.norms(),
            attention=self.attention(window=self.window),
            feed_forward=self.mlp(self.ffn),
        )


class Mistral(MistralFields, Llama):
    """`MistralForCausalLM`: a Llama whose queries may see a window of the last keys alone."""


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
    """`Qwen3MoeForCausalLM`: some layers are dense."""

    names: ClassVar[Mapping[str, str]] = {**Qwen3.names, "moe.router.gate": "mlp.gate"}
    stacked = _STACKED

    def block(self, layer: int) -> Qwen3TransformerBlock.Config:
        config = super().block(layer)
        if self.is_sparse(layer):
            config.feed_forward, config.moe = None, self._moe()
        return config

    def _moe(self) -> MoE.Config:
        router = SoftmaxRouter.Config(
            num_experts=self.num_experts,
            gate=linear(self.hidden_size, self.num_experts),
            top_k=self.top_k,
            score_func="softmax",
            route_norm=self.is_normed,
        )
        experts = Experts.Config(dim=self.hidden_size, hidden_dim=self.expert_ffn, num_experts=self.num_experts)
        return moe_config(router, experts)


class DeepSeekV3(DeepSeekV3Fields, TitanFamily):
    """`DeepseekV3ForCausalLM`, also R1, Kimi K2, Moonlight: latent attention, and experts chosen by groups.

    The bias that steers the choice is loaded and saved as it is, and not trained.
    """

    model = DeepSeekV3Model
    names: ClassVar[Mapping[str, str]] = {
        **NORMS,
        **MLP,
        "attention.wq": "self_attn.q_proj",
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention.wo": "self_attn.o_proj",
        "moe.router.gate": "mlp.gate",
        "moe.expert_bias_E": "mlp.gate.e_score_correction_bias",
        "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
        "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
        "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    }
    stacked = _STACKED

    def rotary_kind(self) -> type[RotaryEmbedding.Config]:
        return InterleavedRotaryEmbedding.Config if self.is_interleaved else RotaryEmbedding.Config

    def block(self, layer: int) -> DeepSeekV3TransformerBlock.Config:
        is_dense = layer < self.num_dense
        return DeepSeekV3TransformerBlock.Config(
            **self.norms(),
            attention=self._latent_attention(),
            feed_forward=self.mlp(self.ffn) if is_dense else None,
            moe=None if is_dense else self._moe(),
        )

    def _latent_attention(self) -> DeepSeekV3Attention.Config:
        width, heads = self.hidden_size, self.num_heads
        plain, rotary, value = self.plain_dim, self.rotary_dim, self.value_dim
        kv_rank, q_rank, queries = self.kv_rank, self.q_rank, heads * (plain + rotary)
        scale = (plain + rotary) ** -0.5 * (self.rope.yarn.score_factor if self.rope.yarn else 1.0)
        return DeepSeekV3Attention.Config(
            dim=width,
            n_heads=heads,
            q_lora_rank=q_rank,
            kv_lora_rank=kv_rank,
            qk_nope_head_dim=plain,
            qk_rope_head_dim=rotary,
            v_head_dim=value,
            wq=None if q_rank else linear(width, queries),
            wq_a=linear(width, q_rank) if q_rank else None,
            wq_b=linear(q_rank, queries) if q_rank else None,
            q_norm=self.norm(q_rank or 1, _LATENT_EPS),
            wkv_a=linear(width, kv_rank + rotary),
            kv_norm=self.norm(kv_rank, _LATENT_EPS),
            wkv_b=linear(kv_rank, heads * (plain + value)),
            wo=linear(heads * value, width),
            rope=self.rotary,
            inner_attention=CausalAttention.Config(scale=scale),
        )

    def _moe(self) -> MoE.Config:
        router = SigmoidRouter.Config(
            num_experts=self.num_experts,
            gate=linear(self.hidden_size, self.num_experts, kind=FloatLinear.Config),
            num_expert_groups=self.num_groups,
            num_limited_groups=self.num_chosen,
            top_k=self.top_k,
            route_norm=self.is_normed,
            route_scale=self.route_scale,
        )
        experts = Experts.Config(dim=self.hidden_size, hidden_dim=self.expert_ffn, num_experts=self.num_experts)
        shared = self.mlp(self.expert_ffn * self.num_shared)
        return moe_config(router, experts, kind=SteeredMoE.Config, shared=shared)


class GptOss(GptOssFields, TitanFamily):
    """`GptOssForCausalLM`: attention sinks, windows in every other layer, experts with biases, transposed in files."""

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
        width, head, bias = self.hidden_size, self.head_dim, self.has_bias
        queries, keys = self.num_heads * head, self.num_kv_heads * head
        return GptOssAttention.Config(
            n_heads=self.num_heads,
            n_kv_heads=self.num_kv_heads,
            head_dim=head,
            dim=width,
            qkv_linear=QKVLinear.Config(
                head_dim=head,
                wq=linear(width, queries, bias=bias),
                wkv=linear(width, keys, bias=bias),
            ),
            wo=linear(queries, width, bias=bias),
            sliding_window_size=window,
            inner_attention=CausalAttention.Config(window=window),
            rope=self.rotary,
            param_init={"sinks": nn.init.zeros_},
        )

    def _moe(self) -> MoE.Config:
        router = LargestLogitsRouter.Config(
            num_experts=self.num_experts,
            gate=linear(self.hidden_size, self.num_experts, bias=True),
            top_k=self.top_k,
        )
        experts = ClampedExperts.Config(
            dim=self.hidden_size,
            hidden_dim=self.ffn,
            num_experts=self.num_experts,
            alpha=self.alpha,
            swiglu_limit=self.limit,
        )
        return moe_config(router, experts)


FAMILIES: Mapping[str, type[TitanFamily]] = {
    "DeepseekV3ForCausalLM": DeepSeekV3,
    "GptOssForCausalLM": GptOss,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}
