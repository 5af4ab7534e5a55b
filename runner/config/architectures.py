"""The architectures that can be trained, and those that support tensor parallelism. No torch: the launcher checks."""

from __future__ import annotations

from manifests.errors import ModelError

__all__ = ["TENSOR_PARALLEL", "TRAINED", "check_trainable"]

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


def check_trainable(architecture: str, where: str = "config.json") -> None:
    """Check that this architecture can be trained.

    Raises:
        ModelError: it cannot; the hint lists those that can.
    """
    if architecture not in TRAINED:
        raise ModelError(
            f"{where}: architectures",
            f"{architecture!r} can be packed, but not trained",
            "trainable: " + ", ".join(TRAINED),
            code="model.no-family",
        )
