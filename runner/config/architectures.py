"""Which architectures train, and which of them with tensor parallelism: asked by the launcher, so without torch."""

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
# Those of them whose matrices can be cut over tensor-parallel ranks.
TENSOR_PARALLEL = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


def check_trainable(architecture: str, where: str = "config.json") -> None:
    """Check that the runner has a family for this architecture.

    Raises:
        InputError: naming those it has.
    """
    if architecture not in TRAINED:
        raise ModelError(
            f"{where}: architectures",
            f"{architecture!r} can be packed, but the runner has no family for it",
            "known to the runner: " + ", ".join(TRAINED),
            code="model.no-family",
        )
