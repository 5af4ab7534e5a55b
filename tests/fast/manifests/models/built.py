"""Configs of tests/data, and the models that transformers builds from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

CONFIGS = Path(__file__).parents[3] / "data" / "configs"
TINY = ("tiny-deepseek-v3", "tiny-gpt-oss", "tiny-llama", "tiny-mistral", "tiny-qwen3", "tiny-qwen3-moe")
TRUE = (
    "deepseek-v3", "gpt-oss-120b", "llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b", "qwen3-235b-a22b", "qwen3-32b",
)  # fmt: skip
# Those that train on transformers' own model classes.
DECODERS = (
    "tiny-falcon", "tiny-gemma2", "tiny-gemma3", "tiny-gpt2", "tiny-mixtral", "tiny-mpt", "tiny-opt", "tiny-phi",
    "tiny-phi3", "tiny-qwen2",
)  # fmt: skip
TRUE_DECODERS = (
    "falcon-40b", "falcon-7b", "gemma-2-9b", "gemma-3-1b", "gpt2", "mixtral-8x7b", "mpt-7b", "opt-125m", "opt-350m",
    "opt-6.7b", "phi-2", "phi-3-mini", "qwen2-0.5b", "qwen2-7b",
)  # fmt: skip


def read_config(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return {**config, **changes}


def build(config: dict[str, Any], device: str = "cpu") -> PreTrainedModel:
    """Build the model of a config; on `meta` without weights."""
    (architecture,) = config["architectures"]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = model_class(model_class.config_class(**config))
    return model


def perturb(model: PreTrainedModel) -> PreTrainedModel:
    """Make every weight differ from what it begins with, biases and norms too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def saved_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Give the name and shape of every tensor in a folder's safetensors file, as that library reads it."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
