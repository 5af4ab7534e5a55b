"""torchtitan's names of the parts of a model, family by family, and Hugging Face's for them.

Source: torchtitan 0.3.0, torchtitan/models/{llama3,qwen3,deepseek_v3,gpt_oss}/state_dict_adapter.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manifests.errors import ModelError

EMBEDDING = "tok_embeddings.weight"
TOP = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
BALANCE = "moe.expert_bias_E"  # a buffer
FUSED = "attention.qkv_linear.wqkv"  # of optimizer state: state dicts of models have its three parts

_ROUTED = "moe.routed_experts.inner_experts"
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QKV = {f"attention.qkv_linear.w{part}": f"self_attn.{part}_proj" for part in "qkv"} | {
    "attention.wo": "self_attn.o_proj"
}
_MLP = {"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
_QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
_ROUTER = {"moe.router.gate": "mlp.gate"}
_EXPERTS = {
    f"{_ROUTED}.w1_EFD": "mlp.experts.{}.gate_proj.weight", f"{_ROUTED}.w2_EDF": "mlp.experts.{}.down_proj.weight",
    f"{_ROUTED}.w3_EFD": "mlp.experts.{}.up_proj.weight",
}  # fmt: skip
_SHARED = {
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj", "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}  # fmt: skip
_MLA = {
    "attention.wq_a": "self_attn.q_a_proj", "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj", "attention.wq": "self_attn.q_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa", "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj", "attention.wo": "self_attn.o_proj",
}  # fmt: skip
_MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "mtp_norm": "shared_head.norm"}

_CONVERT = "convert it with torchtitan's scripts/checkpoint_conversion/convert_to_hf.py"
_UNKNOWN = "model.unknown-torchtitan-layout"


@dataclass(frozen=True, kw_only=True, slots=True)
class TitanNames:
    """The names within a layer.

    Of `modules`, which own a weight or a bias; of lone `parameters`; of `experts`, stacked along a first axis, whose
    number in Hugging Face's names is {}; and of `transposed` parameters, whose last two axes are swapped. `is_rotated`:
    RoPE pairs adjacent rows of query and key heads, and Hugging Face's rows of one half with those of the other.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    transposed: Mapping[str, str] = field(default_factory=dict)
    balanced: str | None = None  # the weight of routers whose balancing bias Hugging Face's model does not have
    is_rotated: bool = False


_FAMILIES: Mapping[str, TitanNames] = {
    "llama": TitanNames(modules=_NORMS | _QKV | _MLP, is_rotated=True),
    "qwen3": TitanNames(modules=_NORMS | _QKV | _MLP | _QK_NORMS),
    "qwen3_moe": TitanNames(
        modules=_NORMS | _QKV | _MLP | _QK_NORMS | _ROUTER, experts=_EXPERTS, balanced="mlp.gate.weight"
    ),
    "deepseek_v3": TitanNames(
        modules=_NORMS | _MLA | _MLP | _ROUTER | _SHARED | _MTP,
        parameters={BALANCE: "mlp.gate.e_score_correction_bias"},
        experts=_EXPERTS,
    ),
    "gpt_oss": TitanNames(
        modules=_NORMS | _QKV | {"moe.router.gate": "mlp.router"},
        parameters={
            "attention.sinks": "self_attn.sinks",
            f"{_ROUTED}.mlp1_bias_EG": "mlp.experts.gate_up_proj_bias",
            f"{_ROUTED}.mlp2_bias_ED": "mlp.experts.down_proj_bias",
        },
        transposed={
            f"{_ROUTED}.mlp1_weight_EGD": "mlp.experts.gate_up_proj",
            f"{_ROUTED}.mlp2_weight_EDF": "mlp.experts.down_proj",
        },
        balanced="mlp.router.weight",
    ),
}


def titan_names(config: Mapping[str, object], where: str) -> TitanNames:
    """Return the names of the family that a config is of.

    Raises:
        ModelError: torchtitan's layout of this architecture is not known.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        problem = f"expected an architecture whose torchtitan layout is known ({', '.join(_FAMILIES)})"
        raise ModelError(where, f"{problem}, found {str(kind)[:80]!r}", _CONVERT, code=_UNKNOWN)
    return _FAMILIES[kind]


def heads_of(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads."""
    queries = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or queries
    assert isinstance(queries, int), "model_shape checked it"
    assert isinstance(keys, int), "model_shape checked it"
    return queries, keys
