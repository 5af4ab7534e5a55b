"""PEFT folders for the tiny Llama, written with no help from peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.builders import Tensor, llama_config, llama_shapes, write_safetensors

PREFIX = "base_model.model."
RANK = 2
MODULES = tuple(f"model.layers.{layer}.self_attn.{leaf}" for layer in range(4) for leaf in ("q_proj", "v_proj"))


def float32(shape: tuple[int, ...], seed: int) -> Tensor:
    values = np.random.default_rng(seed).normal(size=shape).astype("<f4")
    return Tensor(dtype="F32", shape=shape, data=values.tobytes())


def adapter_tensors(modules: tuple[str, ...] = MODULES, seed: int = 0, rank: int = RANK) -> dict[str, Tensor]:
    shapes, tensors = llama_shapes(llama_config()), {}
    for number, module in enumerate(modules):
        rows, columns = shapes[f"{module}.weight"]
        tensors[f"{PREFIX}{module}.lora_A.weight"] = float32((rank, columns), seed + 2 * number)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = float32((rows, rank), seed + 2 * number + 1)
    return tensors


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
    **fields: Any,
) -> Path:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **fields}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = adapter_tensors() if tensors is None else tensors
    write_safetensors(folder / "adapter_model.safetensors", tensors, metadata={"format": "pt", **(metadata or {})})
    return folder
