"""vLLM's own sharded_state loader reads what is exported for its ranks, and what it saves is packed.

`make test-interop` gets it.

Importing vLLM needs CUDA, so that the class of the loader alone is run, with a state dict of the names and shapes that
the layers of vLLM have.
"""

from __future__ import annotations

import ast
import collections
import glob
import os
import shutil
import string
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.fast.reshard.test_vllm_export import CONFIGS, exported, rank_of, run
from tests.interop.test_readers import part_of_interop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LAYERS = {1: [range(5)], 2: [range(3), range(3, 5)]}  # of the stages, by their number


def refuse(*args: object) -> None:
    raise AssertionError(args)  # a warning: of a shape or a dtype


def loader() -> Any:
    """Return an instance of vLLM's loader."""
    path = part_of_interop("vllm") / "vllm" / "model_executor" / "model_loader" / "sharded_state_loader.py"
    found = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    found.bases = []
    namespace: dict[str, Any] = {
        "Any": Any, "collections": collections, "glob": glob, "os": os, "string": string, "time": time, "torch": torch,
        "nn": torch.nn, "is_s3": lambda place: False,
        "logger": SimpleNamespace(warning=refuse, info_once=lambda *args: None),
    }  # fmt: skip
    head = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*head, found], []), str(path), "exec"), namespace)
    made = object.__new__(namespace[found.name])
    made.pattern, made.load_config = None, SimpleNamespace(load_format="sharded_state")
    return made


class Ranks:
    """What vLLM asks of its process groups, and what each rank's model has."""

    def __init__(self, state: dict[str, torch.Tensor], pp: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._state, self._pp, self._tp, self._distributed = state, pp, tp, ModuleType("vllm.distributed")
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.distributed", self._distributed)

    def each(self, *, is_tied: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the state dict of each rank, in whose process vLLM then is."""
        for (stage, layers), rank in product(enumerate(LAYERS[self._pp]), range(self._tp)):
            vars(self._distributed).update(
                get_pp_group=lambda: SimpleNamespace(world_size=self._pp),
                get_tp_group=lambda: SimpleNamespace(world_size=self._tp),
                get_pipeline_model_parallel_rank=lambda stage=stage: stage,
                get_tensor_model_parallel_rank=lambda rank=rank: rank,
            )
            whole = rank_of(self._state, rank, self._tp)
            is_last = stage == self._pp - 1
            wanted = {name for name in whole if name.startswith(tuple(f"model.layers.{layer}." for layer in layers))}
            wanted |= {"model.embed_tokens.weight"} if stage == 0 or (is_tied and is_last) else set()
            wanted |= {"model.norm.weight", "lm_head.weight"} if is_last else set()
            model = {name: whole[name].clone() for name in wanted}
            if is_tied and is_last:
                model["model.embed_tokens.weight"] = model["lm_head.weight"]
            yield model


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loader_of_vllm_fills_every_rank(
    kind: str, pp: int, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, is_tied = loader(), kind.endswith("tied")
    state = exported(kind, tmp_path, "--pp", str(pp), "--tp", str(tp))
    for whole in Ranks(state, pp, tp, monkeypatch).each(is_tied=is_tied):
        model = {name: torch.full_like(tensor, -7) for name, tensor in whole.items()}
        if is_tied and "lm_head.weight" in model:
            model["model.embed_tokens.weight"] = model["lm_head.weight"]
        folder = SimpleNamespace(model=str(tmp_path / "out"), model_weights=None)
        load.load_weights(SimpleNamespace(state_dict=lambda model=model: model), folder)
        assert all(torch.equal(model[name], whole[name]) for name in whole)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_vllm_saves_is_packed(
    kind: str, pp: int, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, is_tied = type(loader()).save_model, kind.endswith("tied")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "served").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "served")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for whole in Ranks(state, pp, tp, monkeypatch).each(is_tied=is_tied):
        save(SimpleNamespace(state_dict=lambda whole=whole: whole), str(tmp_path / "served"), max_size=20_000)
    run("pack", tmp_path / "served", "--layout", "pp=2", "--out", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "hf", "--out", tmp_path / "back")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "model"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
