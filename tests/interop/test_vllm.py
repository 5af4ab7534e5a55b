"""vLLM's own sharded_state loader reads the files of each of its ranks, and lacks nothing. `make test-interop` gets it.

Importing vLLM needs CUDA, so that the class of the loader alone is run, with a state dict of the names and shapes that
the layers of vLLM have.
"""

from __future__ import annotations

import ast
import collections
import glob
import os
import string
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fast.reshard.test_vllm_export import CONFIGS, exported, rank_of
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


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loader_of_vllm_fills_every_rank(
    kind: str, pp: int, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = loader()
    state, is_tied = exported(kind, tmp_path, "--pp", str(pp), "--tp", str(tp)), kind.endswith("tied")
    ranks = ModuleType("vllm.distributed")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", ranks)
    for stage, layers in enumerate(LAYERS[pp]):
        for rank in range(tp):
            vars(ranks).update(
                get_pp_group=lambda: SimpleNamespace(world_size=pp),
                get_tp_group=lambda: SimpleNamespace(world_size=tp),
                get_pipeline_model_parallel_rank=lambda stage=stage: stage,
                get_tensor_model_parallel_rank=lambda rank=rank: rank,
            )
            whole = rank_of(state, rank, tp)
            wanted = {name for name in whole if name.startswith(tuple(f"model.layers.{layer}." for layer in layers))}
            wanted |= {"model.embed_tokens.weight"} if stage == 0 or is_tied else set()
            wanted |= {"model.norm.weight", "lm_head.weight"} if stage == pp - 1 else set()
            model = {name: torch.full_like(whole[name], -7) for name in wanted}
            if is_tied and stage == pp - 1:
                model["model.embed_tokens.weight"] = model["lm_head.weight"]
            folder = SimpleNamespace(model=str(tmp_path / "out"), model_weights=None)
            load.load_weights(SimpleNamespace(state_dict=lambda model=model: model), folder)
            assert all(torch.equal(model[name], whole[name]) for name in wanted)
