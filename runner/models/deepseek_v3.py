"""DeepSeek-V3 and R1, Kimi K2, Moonlight on torchtitan's DeepSeek-V3 modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from runner.models.attention import CausalAttention
from runner.models.experts import Experts, FloatLinear, SigmoidRouter, SteeredMoE, moe_config
from runner.models.rope import InterleavedRotaryEmbedding, RotaryEmbedding
from runner.models.titan_fields import DeepSeekV3Fields
from runner.models.titan_modules import DeepSeekV3Attention, DeepSeekV3Model, DeepSeekV3TransformerBlock, Linear, MoE
from runner.models.torchtitan import MLP, NO_INIT, NORMS, TitanFamily

_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says: `DeepseekV3RMSNorm`


class DeepSeekV3(DeepSeekV3Fields, TitanFamily):
    """`DeepseekV3ForCausalLM`: latent attention, and experts chosen by groups.

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
    stacked: ClassVar[Mapping[str, str]] = {
        f"moe.routed_experts.inner_experts.{name}": f"mlp.experts.{{}}.{part}.weight"
        for name, part in (("w1_EFD", "gate_proj"), ("w3_EFD", "up_proj"), ("w2_EDF", "down_proj"))
    }

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
            wq=None if q_rank else _linear(width, queries),
            wq_a=_linear(width, q_rank) if q_rank else None,
            wq_b=_linear(q_rank, queries) if q_rank else None,
            q_norm=self.norm(q_rank or 1, _LATENT_EPS),
            wkv_a=_linear(width, kv_rank + rotary),
            kv_norm=self.norm(kv_rank, _LATENT_EPS),
            wkv_b=_linear(kv_rank, heads * (plain + value)),
            wo=_linear(heads * value, width),
            rope=self.rotary,
            inner_attention=CausalAttention.Config(scale=scale),
        )

    def _moe(self) -> MoE.Config:
        ffn, count = self.expert_ffn, self.num_experts
        router = SigmoidRouter.Config(
            num_experts=count,
            gate=FloatLinear.Config(in_features=self.hidden_size, out_features=count, param_init=NO_INIT),
            num_expert_groups=self.num_groups,
            num_limited_groups=self.num_chosen,
            top_k=self.top_k,
            route_norm=self.is_normed,
            route_scale=self.route_scale,
        )
        experts = Experts.Config(dim=self.hidden_size, hidden_dim=ffn, num_experts=count)
        shared = self.mlp(ffn * self.num_shared)
        return moe_config(router, experts, kind=SteeredMoE.Config, shared=shared)


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=NO_INIT)
