"""Read a PEFT folder with vLLM's own loader, of which compiled parts are replaced by empty ones.

usage: read_vllm_lora.py VLLM FOLDER OUT
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

REAL = {"vllm.lora.lora_model", "vllm.lora.lora_weights", "vllm.lora.peft_helper", "vllm.lora.utils"}


class Empty(ModuleType):
    """A module of which each name is a class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None, "info_once": lambda *args: None})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, place: Path) -> None:
        self.place = place

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm" and name != "regex":
            return None
        if name in REAL:
            return importlib.util.spec_from_file_location(name, self.place / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "regex":
            import re

            module.match = re.match  # type: ignore[attr-defined]
        if module.__name__ == "vllm.utils.torch_utils":
            module.PIN_MEMORY = False  # type: ignore[attr-defined]
        if module.__name__ == "vllm.logger":
            module.init_logger = lambda name: Empty("logger").logger()  # type: ignore[attr-defined]


def main(place: Path, folder: Path, out: Path) -> None:
    sys.meta_path.insert(0, Finder(place))
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    config = json.loads((folder / "adapter_config.json").read_text())
    helper = PEFTHelper.from_dict(config)
    assert helper._validate_features() == []
    modules = set(config["target_modules"]) | ({"experts"} if config["target_parameters"] else set())
    read = LoRAModel.from_local_checkpoint(str(folder), modules, helper, lora_model_id=1, device="cpu")
    halves = {f"{name}.{half}": getattr(lora, f"lora_{half}").float().numpy()
              for name, lora in read.loras.items() for half in "ab"}  # fmt: skip
    scales = {f"{name}.scale": np.float64(lora.scaling) for name, lora in read.loras.items()}
    np.savez(out, **halves, **scales)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
