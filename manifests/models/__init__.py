"""What a model's config promises to be on disk: its modules, tensors, shapes and ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from manifests.errors import ModelError, Parameter
from manifests.models.config import ConfigReader, check_readable
from manifests.models.gpt2 import falcon_shape, gpt2_shape, mpt_shape, opt_shape, phi3_shape, phi_shape
from manifests.models.llama import (
    deepseek_v3_shape,
    gemma2_shape,
    gemma3_shape,
    gpt_oss_shape,
    llama_shape,
    mistral_shape,
    mixtral_shape,
    qwen2_shape,
    qwen3_moe_shape,
    qwen3_shape,
)
from manifests.models.shape import ModelShape, StoredTensors, Work, is_expert, is_layer, module_of
from manifests.models.windows import windows_of
from manifests.schema import ModelDescription

__all__ = [
    "ARCHITECTURES",
    "ConfigReader",
    "ModelShape",
    "StoredTensors",
    "Work",
    "architecture_of",
    "check_experts",
    "check_readable",
    "is_expert",
    "is_sized_by_files",
    "model_shape",
    "module_of",
    "tensor_names",
]

ARCHITECTURES: Mapping[str, Callable[[ConfigReader], ModelShape]] = {
    "DeepseekV3ForCausalLM": deepseek_v3_shape,
    "FalconForCausalLM": falcon_shape,
    "GPT2LMHeadModel": gpt2_shape,
    "Gemma2ForCausalLM": gemma2_shape,
    "Gemma3ForCausalLM": gemma3_shape,
    "GptOssForCausalLM": gpt_oss_shape,
    "LlamaForCausalLM": llama_shape,
    "MPTForCausalLM": mpt_shape,
    "MistralForCausalLM": mistral_shape,
    "MixtralForCausalLM": mixtral_shape,
    "MptForCausalLM": mpt_shape,
    "OPTForCausalLM": opt_shape,
    "Phi3ForCausalLM": phi3_shape,
    "PhiForCausalLM": phi_shape,
    "Qwen2ForCausalLM": qwen2_shape,
    "Qwen3ForCausalLM": qwen3_shape,
    "Qwen3MoeForCausalLM": qwen3_moe_shape,
}
_LAYERS = ("num_hidden_layers", "num_nextn_predict_layers")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")  # what configs call their number in a layer
_MOST_EXPERTS = 200_000  # ten times DeepSeek-V3's


def model_shape(
    config: Mapping[str, object],
    where: str = "config.json",
    stored: StoredTensors | None = None,
    description: ModelDescription | None = None,
) -> ModelShape:
    """Return the shape of the model that a Hugging Face config describes.

    An architecture that only the catalogue or a `description` describes has the tensors and shapes that are `stored`.
    Of another, the config alone decides, and they are not looked at.
    """
    check_readable(config, where)
    name = architecture_of(config, where, description)
    check_experts(config, where)
    reader = ConfigReader(config, where)
    if name in ARCHITECTURES:
        reader.expect("per_layer_config", None)
        shape = ARCHITECTURES[name](reader)
        layers = [module for module in shape.modules if is_layer(module)][: shape.num_layers]
        return replace(shape, windows=windows_of(name, config, layers))
    from manifests.models.by_names import shape_by_catalogue

    return shape_by_catalogue(name, config, where, stored, description)


def is_sized_by_files(config: Mapping[str, object], where: str, description: ModelDescription | None = None) -> bool:
    """Return whether `model_shape` needs the stored tensors of a config's architecture."""
    return architecture_of(config, where, description) not in ARCHITECTURES


def tensor_names(config: Mapping[str, object], where: str) -> Callable[[str], bool]:
    """Return what says whether files of an architecture have a tensor of a name; of one not known here, none."""
    try:
        name = architecture_of(config, where)
    except ModelError:
        return lambda name: False
    if name in ARCHITECTURES:
        return model_shape(config, where).tensors.__contains__
    from manifests.models.catalogue import entry_of

    entry = entry_of(name)
    assert entry is not None, name
    return entry.has


def architecture_of(
    config: Mapping[str, object], where: str = "config.json", description: ModelDescription | None = None
) -> str:
    """Return the architecture that a config, or else its description, names."""
    value = config.get("architectures")
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if description is not None:
        return _described_name(description, name, where)
    if not isinstance(name, str) or not _is_known(name):
        raise ModelError(
            f"{where}: architectures",
            f"{name!r} is not supported",
            f"docs/models.md lists what is; {Parameter('model')} describes another",
            code="config.unsupported-architecture",
        )
    return name


def _is_known(name: str) -> bool:
    if name in ARCHITECTURES:
        return True
    from manifests.models.catalogue import entry_of

    return entry_of(name) is not None


def _described_name(description: ModelDescription, named: object, where: str) -> str:
    name = description.architecture or named
    if not isinstance(name, str):
        raise ModelError(
            f"{where}: architectures",
            f"expected the name of one architecture, found {str(named)[:80]!r}",
            f"name it in the file of {Parameter('model')}: architecture = 'MyModel'",
            code="config.unsupported-architecture",
        )
    if name in ARCHITECTURES:
        raise ModelError(
            f"{where}: architectures",
            f"{name} is known tensor by tensor, and {Parameter('model')} is for other architectures",
            f"leave {Parameter('model')} out, or give the architecture another name in its file: "
            "architecture = 'MyModel'",
            code="model.known-architecture",
        )
    return name


def check_experts(config: Mapping[str, object], where: str) -> None:
    """Refuse a table of tensors that would exhaust memory before it is made: too many layers times experts."""
    layers = sum(count for count in map(config.get, _LAYERS) if type(count) is int)
    for name, experts in ((name, config.get(name)) for name in _EXPERTS):
        if type(experts) is int and layers * experts > _MOST_EXPERTS:
            problem = f"expected at most {_MOST_EXPERTS} experts in all layers, found {layers * experts}"
            raise ModelError(f"{where}: {name}", problem, code="config.too-large")
