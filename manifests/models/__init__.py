"""What a model's config promises to be on disk: its modules, tensors, shapes and ties."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from manifests.errors import InputError
from manifests.models.llama import llama_shape
from manifests.models.shape import ConfigReader, ModelShape

__all__ = ["ARCHITECTURES", "ConfigReader", "ModelShape", "model_shape", "module_of"]

ARCHITECTURES: Mapping[str, Callable[[ConfigReader], ModelShape]] = {
    "LlamaForCausalLM": llama_shape,
}


def model_shape(config: Mapping[str, object], where: str = "config.json") -> ModelShape:
    """Give the modules and tensors of the model that a Hugging Face config describes.

    Raises:
        InputError: an architecture that is not known, or a field missing or of the wrong kind.
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


def module_of(fqn: str, modules: Container[str]) -> str | None:
    """Give the module that owns a tensor: the longest dotted prefix among `modules`."""
    prefix = fqn
    while "." in prefix:
        prefix = prefix.rpartition(".")[0]
        if prefix in modules:
            return prefix
    return None
