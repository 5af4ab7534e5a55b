"""Configs of tests/data, and the models that transformers builds from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

__all__ = ["TINY", "TRUE", "build", "read_config", "saved_tensors"]

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
TINY = ("tiny-deepseek-v3", "tiny-gpt-oss", "tiny-llama", "tiny-mistral", "tiny-qwen3", "tiny-qwen3-moe")
TRUE = (
    "deepseek-v3", "gpt-oss-120b", "llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b", "qwen3-235b-a22b", "qwen3-32b",
)  # fmt: skip


def read_config(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return {**config, **changes}


def build(config: dict[str, Any], device: str = "cpu") -> PreTrainedModel:
    """Build the model of a config; on `meta` without weights."""
    (architecture,) = config["architectures"]
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = getattr(transformers, architecture)(config_class(**config))
    return model


def saved_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Give the name and shape of every tensor in a folder's safetensors file, as that library reads it."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
