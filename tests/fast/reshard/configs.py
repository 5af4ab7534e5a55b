"""Configs of a tiny model, and times that someone might have measured on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.builders import llama_config


def write_config(path: Path, **overrides: Any) -> Path:
    path.write_text(json.dumps(llama_config(**overrides)))
    return path


def write_times(path: Path, seconds: dict[str, tuple[float, float]]) -> Path:
    modules = {module: {"forward_s": forward, "backward_s": back} for module, (forward, back) in seconds.items()}
    path.write_text(json.dumps({"version": 1, "modules": modules}))
    return path


def modules_of(num_layers: int) -> list[str]:
    return ["model.embed_tokens", *(f"model.layers.{index}" for index in range(num_layers)), "model.norm", "lm_head"]
