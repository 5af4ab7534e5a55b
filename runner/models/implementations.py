"""What of a config chooses code: taken out of it, since the runner chooses. See Note [No code from a config]."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from manifests.errors import ModelError, UsageError
from manifests.models.catalogue import CatalogueEntry

# Note [No code from a config]
# `attn_implementation` may name a repository of the hub: with the package `kernels` installed, transformers downloads
# and runs its native code, whatever `trust_remote_code` says; `flash_attention_2` and `paged|eager` cannot train here.
# `auto_map` names code, `_name_or_path` where to get it. `gradient_checkpointing` would recompute beside `--ac`.
_CHOOSE_CODE = (
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal", "auto_map",
    "name_or_path", "_name_or_path", "gradient_checkpointing", "use_kernels", "kernel_config",
)  # fmt: skip
_DTYPES = ("dtype", "torch_dtype")

# Note [Shared keys in float32]
# CUDA has no fused attention in float32 for heads that share keys: torch computes it in several operations, and every
# layer keeps its scores. With keys and values repeated, as transformers does where there is a mask, it is fused.
_use_gqa = sdpa_attention.use_gqa_in_sdpa


def shares_keys(attention_mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether attention takes the keys and values that heads share as they are."""
    is_unfused = key.is_cuda and key.dtype == torch.float32
    return not is_unfused and _use_gqa(attention_mask, key, value)


setattr(sdpa_attention, "use_gqa_in_sdpa", shares_keys)  # noqa: B010 - mypy forbids to assign to a function


def without_implementations(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and the configs in it, without the fields that choose code: transformers' defaults remain.

    So is a dtype that torch does not have: transformers takes any attribute of torch for one.
    """
    return {
        name: without_implementations(value) if isinstance(value, Mapping) and name.endswith("_config") else value
        for name, value in config.items()
        if name not in _CHOOSE_CODE and (name not in _DTYPES or _is_dtype(value))
    }


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def check_model_type(config: Mapping[str, Any], architecture: str) -> None:
    """Refuse a config whose `model_type` is another architecture's: transformers chooses the class by that."""
    model_type = config.get("model_type")
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    names = (classes,) if isinstance(classes, str) else tuple(classes or ())
    if (
        names
        and architecture not in names
        and getattr(transformers, architecture).config_class.model_type != model_type
    ):
        problem = f"{model_type!r} is the type of {' and '.join(names)}, and architectures names {architecture}"
        hint = "correct the one that is wrong: transformers reads model_type"
        raise ModelError("config.json: model_type", problem, hint, code="config.contradictory-fields")


def class_and_fields(
    entry: CatalogueEntry, config: Mapping[str, object]
) -> tuple[type[PreTrainedModel], Mapping[str, object]]:
    """Return the model to run and its config: of a class that takes images as well, the decoder by itself."""
    model_class: type[PreTrainedModel] = getattr(transformers, entry.architecture)
    if not entry.section:
        return model_class, config
    config_class: Any = model_class.config_class
    decoder = getattr(config_class.from_dict(copy.deepcopy(dict(config))), entry.section)
    by_config: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return by_config[type(decoder)], decoder.to_dict()


def check_length(config: Any, seq_len: int) -> None:
    """Refuse sequences that are longer than the positions that a model was made for."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and seq_len > most:
        problem = f"expected at most {most}, which is max_position_embeddings of the model's config, found {seq_len}"
        raise UsageError("--seq-len", problem, code="options.sequence-length")
