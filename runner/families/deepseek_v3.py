"""DeepSeek-V3 and R1, Kimi K2, Moonlight on torchtitan's DeepSeek-V3 modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torchtitan.models.common import Linear
from torchtitan.models.common.moe import MoE
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3Model, DeepSeekV3TransformerBlock

from runner.families.attention import CausalAttention
from runner.families.experts import Experts, FloatLinear, SigmoidRouter, SteeredMoE, moe_config
from runner.families.rope import InterleavedRotaryEmbedding, RotaryEmbedding, positive_number, rotary_config
from runner.families.titan import MLP, NO_INIT, NORMS, TitanFamily

__all__ = ["DeepSeekV3"]

_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says: `DeepseekV3RMSNorm`
_DEFAULT_GROUPS, _DEFAULT_CHOSEN = 8, 4  # DeepseekV3Config


class DeepSeekV3(TitanFamily):
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
    modelled: ClassVar[Mapping[str, tuple[object, ...]]] = {"scoring_func": ("sigmoid",)}

    def read_layers(self) -> None:
        self._ffn, self._rope = self.read.count("intermediate_size"), self.rope()
        self._num_dense = self.read.count("first_k_dense_replace", least=0)
        if self.num_kv_heads != self.num_heads:
            problem = f"expected num_attention_heads {self.num_heads}, found {self.num_kv_heads}"
            raise self.read.error("num_key_value_heads", problem)
        self._check_groups()

    def rope(self) -> RotaryEmbedding.Config:
        is_interleaved = self._flag("rope_interleave")
        return rotary_config(
            self.read.config,
            head_dim=self.read.count("qk_rope_head_dim"),
            max_seq_len=self.max_seq_len,
            where=self.read.where,
            kind=InterleavedRotaryEmbedding.Config if is_interleaved else RotaryEmbedding.Config,
        )

    def block(self, layer: int) -> DeepSeekV3TransformerBlock.Config:
        is_dense = layer < self._num_dense
        return DeepSeekV3TransformerBlock.Config(
            **self.norms(),
            attention=self._latent_attention(),
            feed_forward=self.mlp(self._ffn) if is_dense else None,
            moe=None if is_dense else self._moe(),
        )

    def _latent_attention(self) -> Attention.Config:
        read, width, heads = self.read, self.hidden_size, self.num_heads
        plain, rotary = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
        value, kv_rank = read.count("v_head_dim"), read.count("kv_lora_rank")
        q_rank, queries = read.count("q_lora_rank", 0), heads * (plain + rotary)
        scale = (plain + rotary) ** -0.5 * (self._rope.yarn.score_factor if self._rope.yarn else 1.0)
        return Attention.Config(
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
            rope=self._rope,
            inner_attention=CausalAttention.Config(scale=scale),
        )

    def _moe(self) -> MoE.Config:
        read, ffn = self.read, self.read.count("moe_intermediate_size")
        count = read.count("n_routed_experts")
        router = SigmoidRouter.Config(
            num_experts=count,
            gate=FloatLinear.Config(in_features=self.hidden_size, out_features=count, param_init=NO_INIT),
            num_expert_groups=read.count("n_group", _DEFAULT_GROUPS),
            num_limited_groups=read.count("topk_group", _DEFAULT_CHOSEN),
            top_k=read.count("num_experts_per_tok"),
            route_norm=self._flag("norm_topk_prob"),
            route_scale=positive_number(read.config, "routed_scaling_factor", f"{read.where}: ", 2.5),
        )
        experts = Experts.Config(dim=self.hidden_size, hidden_dim=ffn, num_experts=count)
        shared = self.mlp(ffn * read.count("n_shared_experts"))
        return moe_config(router, experts, kind=SteeredMoE.Config, shared=shared)

    def _flag(self, name: str) -> bool:
        """Give a flag that is on where it is absent and, as transformers reads it, off where it is null."""
        return self.read.flag(name, name not in self.read.config)

    def _check_groups(self) -> None:
        """Refuse groups that experts cannot be chosen from."""
        count, groups = self.read.count("n_routed_experts"), self.read.count("n_group", _DEFAULT_GROUPS)
        if count % groups or count // groups < 2:
            raise self.read.error("n_group", f"expected groups of equally many experts, 2 or more, found {groups}")
        chosen = self.read.count("topk_group", _DEFAULT_CHOSEN, most=groups)
        most = chosen * (count // groups)
        self.read.count("num_experts_per_tok", most=most)


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=NO_INIT)
