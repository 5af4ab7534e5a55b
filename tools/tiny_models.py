"""Tiny configs of every decoder of the installed transformers, by the class's own config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
DROPOUTS = (
    "activation_dropout", "attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop",
    "embed_dropout", "embedding_dropout", "hidden_dropout", "layerdrop", "resid_pdrop", "residual_dropout",
)  # fmt: skip

# Sizes by the names that configs have for them; a config gets those of its own fields.
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_d_state"), 16),
    **dict.fromkeys(("kv_channels", "state_size", "hidden_size_per_layer_input", "index_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads"), 2),
    "index_n_heads": 16,  # with few, scores of several keys are 0 at once, and the choice is anybody's
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 16,
    "sliding_window": 8,
    "index_topk": 8,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(DROPOUTS, 0.0),
}  # fmt: skip

# In the proportions of true models, for what is measured; heads of equal widths, as a fused attention on CPUs has.
WIDE: Mapping[str, Any] = {
    **_SMALL,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 256),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff"), 896),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels"), 32),
    **dict.fromkeys(("kv_lora_rank", "hidden_size_per_layer_input", "mamba_d_head", "global_head_dim"), 64),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    "q_lora_rank": 96,
    "sliding_window": 512,
}

# What a config needs besides, where its own checks or its model refuse these sizes, or where they would leave out a
# kind of layer that the architecture has.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "BailingHybridForCausalLM": {"n_group": 1, "topk_group": 1, "num_local_experts": 4, "layer_group_size": 2},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "DbrxForCausalLM": {
        "n_layers": LAYERS,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV4ForCausalLM": {
        "head_dim": 64,
        "layer_types": [
            "heavily_compressed_attention",
            *["compressed_sparse_attention"] * 2,
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    },
    "Dots3NoteForCausalLM": {
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "Gemma4ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    "Gemma4ForConditionalGeneration": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    },
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    "GlmMoeDsaForCausalLM": {"indexer_types": ["full", "shared", "full", "shared"]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "JambaForCausalLM": {"attn_layer_period": LAYERS, "attn_layer_offset": 2},
    "KimiLinearForCausalLM": {
        "num_local_experts": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    },
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "num_dense_layers": 1},
    "Llama4ForCausalLM": {"interleave_moe_layer_step": 2},
    "Llama4ForConditionalGeneration": {"text_config": {"interleave_moe_layer_step": 2}},
    "LongcatFlashForCausalLM": {
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "head_dim": 8,
    },
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "MiMoV2FlashForCausalLM": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "MiniMaxM3VLForCausalLM": {
        "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2),
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
    },
    "MptForCausalLM": {"n_layers": LAYERS},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 128,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2), "hybrid_layer_ids": [1, 3]},
    "ZambaForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
    },
}


# Classes that take images or sound, too, around one of the decoders above.
MULTIMODAL = (
    "FuyuForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GotOcr2ForConditionalGeneration", "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration", "LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
# A decoder that transformers maps to another task.
_UNMAPPED = ("Mistral4ForCausalLM",)
# Sizes of their other parts: fewer layers than the decoder has.
_SMALL_TOWER: Mapping[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "depth"), 3),
    **dict.fromkeys(("image_size", "default_output_length"), 32),
    **dict.fromkeys(("patch_size", "num_position_embeddings", "position_embedding_size"), 16),
    **dict.fromkeys(("out_hidden_size", "output_proj_dims", "embed_dim", "mm_embed_dim", "projector_input_dim"), 64),
    "mm_posemb_size": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "vision_output_dim": 64,
    "projector_output_dim": 64,
    "global_head_dim": 16,
}


def decoder_classes() -> Iterator[tuple[str, type[PreTrainedModel]]]:
    """Yield the distinct classes that transformers takes for causal language models, by name, in order."""
    names = {*_UNMAPPED}
    for found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update((found,) if isinstance(found, str) else found)
    for name in sorted({*names, *MULTIMODAL}):
        yield name, getattr(transformers, name)


def tiny_config(model: type[PreTrainedModel], sizes: Mapping[str, Any] = _SMALL, **changes: Any) -> Any:
    """Return a config of a few layers and small widths, or those of `sizes`.

    Raises:
        Exception: whatever the config class raises of a config that it refuses.
    """
    kind = model.config_class
    own = {**_OWN.get(model.__name__, {})}
    for name, value in changes.items():
        own[name] = {**own[name], **value} if name.endswith("text_config") and name in own else value
    if model.__name__ in MULTIMODAL:
        return _multimodal(kind, own, sizes)
    return _tiny(kind, own, sizes)


def _multimodal(kind: Any, own: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    """Return a config whose text model is that of the decoder by itself, beside a tower of fewer layers."""
    default = {name: kind().to_dict().get(name) or part().to_dict() for name, part in kind.sub_configs.items()
               if kind().to_dict().get(name) or part is not AutoConfig}  # fmt: skip
    parts = {}
    for name in default:
        found = type(getattr(kind(), name)) if getattr(kind(), name) is not None else kind.sub_configs[name]
        tower = {} if name == "text_config" else {field: size for field, size in _SMALL_TOWER.items()
                                                   if field in default[name]}  # fmt: skip
        of_part = sizes if name == "text_config" else _SMALL
        parts[name] = _tiny(found, {**tower, **own.get(name, {})}, of_part).to_dict()
    outside = {name: size for name, size in own.items() if name not in parts}
    return kind(**{**parts, **outside})


def _tiny(kind: Any, own: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    default = kind().to_dict()
    sizes = {name: size for name, size in sizes.items() if name in default}
    if "qk_rope_head_dim" in default:  # a head's width is another thing under latent attention
        sizes = {name: size for name, size in sizes.items() if name not in ("head_dim", "partial_rotary_factor")}
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}
    # Lists with an entry for each layer: the class's default for this number of them.
    lists = {
        name: None
        for name, found in default.items()
        if isinstance(found, list) and len(found) > LAYERS and all(isinstance(item, (str, int)) for item in found)
    }
    # Lists with each type of layer that the default has, where the first few are of one type.
    types = list(dict.fromkeys(default["layer_types"] or ())) if "layer_types" in default else []
    if 1 < len(types) <= LAYERS and len(set(default["layer_types"][:LAYERS])) < len(types):
        lists["layer_types"] = (types * LAYERS)[:LAYERS]
    set_only = {name: size for name, size in sizes.items() if default[name] is not None}
    failed: Exception | None = None
    for fields in ({**sizes, **lists}, {**set_only, **lists}, sizes, set_only):
        try:
            return kind(**{**fields, **own})
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed
