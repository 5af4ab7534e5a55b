"""Megatron's names of its files and of the parts of a model, family by family, and Hugging Face's for them.

Source: megatron-core 0.16.1, models/gpt, transformer and transformer/moe: `sharded_state_dict` of its modules, and the
keys that its layer specs for Transformer Engine and for itself ("local") give them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from manifests.errors import ModelError, SourceError
from reshard.archives.names import METADATA_NAME
from stores.base import Folder, read_range
from stores.open import open_below

COMMON_NAME = "common.pt"
COMMON_ENTRY = "common_state/shard_0_1"  # in its place since megatron-core 0.19: an object, in a .distcp file
INTEGRITY_NAME = "integrity.json"  # digests of the other files; later releases write it with verify_integrity=True
MARK = {  # what the file that Megatron-Core writes last says
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Common:
    """What a checkpoint has beside tensors, and where: the file of `COMMON_NAME`, or `COMMON_ENTRY`."""

    values: Mapping[object, object]
    place: str


EMBEDDING, HEAD, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
QKV = "self_attention.linear_qkv.weight"
# What Hugging Face's MTP layers have of their own, and Megatron's share with the model.
MTP_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}

_QKV_LAYER = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
}
_QK_NORMS = {
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
}
_MLP = {
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
}
_ROUTER = {"mlp.gate.weight": ("mlp.router.weight",)}
_GATED = {"mlp.linear_fc1": "mlp.{}_proj.weight"}
_LATENT = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attn.q_proj.weight": ("self_attention.linear_q_proj.weight",),
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight",),
    "self_attn.q_a_layernorm.weight": (
        "self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight",
    ),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight",),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight",),
    "self_attn.kv_a_layernorm.weight": (
        "self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight",
    ),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight",),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
}  # fmt: skip
_BALANCED = {"mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias",)}
_SHARED = {"mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight",)}
_SHARED_GATED = {"mlp.shared_experts.linear_fc1": "mlp.shared_experts.{}_proj.weight"}
_MTP = {
    "enorm.weight": ("enorm.weight",), "hnorm.weight": ("hnorm.weight",), "eh_proj.weight": ("eh_proj.weight",),
    "shared_head.norm.weight": ("final_layernorm.weight",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronNames:
    """The names within a layer.

    `parameters` maps Hugging Face's to Megatron's: one for each layer spec, and the same tensor under any. `gated` maps
    the projections that have a gate's rows and then an up projection's to Hugging Face's name, with {} for either.
    `mtp` has the names of what an MTP layer has beside a decoder layer; empty if the family has no such layers.
    """

    parameters: Mapping[str, tuple[str, ...]]
    gated: Mapping[str, str]
    has_experts: bool = False
    mtp: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def modules(self) -> set[str]:
        """The modules of a decoder layer that have parameters."""
        keys = {key.rpartition(".")[0] for spelled in self.parameters.values() for key in spelled}
        return keys | set(self.gated)


_FAMILIES: Mapping[str, MegatronNames] = {
    "llama": MegatronNames(parameters=_QKV_LAYER | _MLP, gated=_GATED),
    "qwen3": MegatronNames(parameters=_QKV_LAYER | _QK_NORMS | _MLP, gated=_GATED),
    "qwen3_moe": MegatronNames(
        parameters=_QKV_LAYER | _QK_NORMS | _MLP | _ROUTER, gated=_GATED, has_experts=True
    ),
    "deepseek_v3": MegatronNames(
        parameters=_LATENT | _MLP | _ROUTER | _BALANCED | _SHARED, gated=_GATED | _SHARED_GATED, has_experts=True,
        mtp=_MTP,
    ),
}  # fmt: skip


def megatron_names(config: Mapping[str, object], where: str) -> MegatronNames:
    """Return the names of the family that a config is of."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        problem = f"expected an architecture whose Megatron-Core layout is known ({', '.join(_FAMILIES)})"
        hint = "convert it with Megatron-Bridge's AutoBridge, if it knows this model"
        raise ModelError(
            where, f"{problem}, found {str(kind)[:80]!r}", hint, code="model.unknown-megatron-layout"
        )  # fmt: skip
    return _FAMILIES[kind]


TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # in place of a number: weights that were converted


def find_iteration(address: str, folder: Folder) -> Folder:
    """Return the folder of the iteration to load if this is where Megatron-LM keeps them; else the folder itself."""
    names = folder.names()
    if TRACKER_NAME not in names or METADATA_NAME in names:
        return folder
    file = folder.file(TRACKER_NAME)
    text = read_range(file, 0, min(file.nbytes, 100)).decode(errors="replace").strip()
    if text != RELEASE and not re.fullmatch(r"[0-9]{1,12}", text):
        problem = f"expected a number or {RELEASE!r}, found {text!r}"
        raise SourceError(str(file), problem, "name the folder of the iteration", code="source.bad-tracker")
    return open_below(address, folder, RELEASE if text == RELEASE else f"iter_{int(text):07d}")
