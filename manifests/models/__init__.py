"""What a model's config promises to be on disk: its modules, tensors, shapes and ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manifests.errors import InputError
from manifests.models.config import ConfigReader
from manifests.models.deepseek_v3 import deepseek_v3_shape
from manifests.models.gpt_oss import gpt_oss_shape
from manifests.models.llama import llama_shape, mistral_shape
from manifests.models.qwen3 import qwen3_moe_shape, qwen3_shape
from manifests.models.shape import ModelShape, Work, module_of

__all__ = ["ARCHITECTURES", "ConfigReader", "ModelShape", "Work", "model_shape", "module_of"]

ARCHITECTURES: Mapping[str, Callable[[ConfigReader], ModelShape]] = {
    "DeepseekV3ForCausalLM": deepseek_v3_shape,
    "GptOssForCausalLM": gpt_oss_shape,
    "LlamaForCausalLM": llama_shape,
    "MistralForCausalLM": mistral_shape,
    "Qwen3ForCausalLM": qwen3_shape,
    "Qwen3MoeForCausalLM": qwen3_moe_shape,
}


def model_shape(config: Mapping[str, object], where: str = "config.json") -> ModelShape:
    """Give the modules and tensors of the model that a Hugging Face config describes.

    Raises:
        InputError: an architecture that is not known, or a field missing, of the wrong kind or not modelled.
    """
    found = config.get("architectures")
    name = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(
            f"{where}: architectures",
            f"{name!r} is not known",
            "known: " + ", ".join(sorted(ARCHITECTURES)),
        )
    return ARCHITECTURES[name](ConfigReader(config, where))
