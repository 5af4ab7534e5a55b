"""The architectures that can be trained, and those that support tensor parallelism. No torch: the launcher checks."""

from __future__ import annotations

from manifests.errors import ModelError
from manifests.models.catalogue import entry_of

__all__ = ["TENSOR_PARALLEL", "TRAINED", "check_trainable", "is_generic"]

# The architectures that have a family, known here so that launch can refuse the others without torch.
TRAINED = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    # On transformers' own model classes:
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "MptForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
)
# Those that support tensor parallelism.
TENSOR_PARALLEL = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


def is_generic(architecture: str) -> bool:
    """Return whether an architecture trains by the catalogue, on transformers' own forward."""
    entry = entry_of(architecture) if architecture not in TRAINED else None
    return entry is not None and not entry.refused


def check_trainable(architecture: str, where: str = "config.json") -> None:
    """Check that this architecture can be trained.

    Raises:
        ModelError: it cannot, with the reason.
    """
    if architecture in TRAINED or is_generic(architecture):
        return
    entry = entry_of(architecture)
    why = f": {entry.refused}" if entry is not None and entry.refused else ""
    raise ModelError(
        f"{where}: architectures",
        f"{architecture!r} can be packed, but not trained{why}",
        "docs/models.md lists the architectures that train",
        code="model.no-family",
    )
