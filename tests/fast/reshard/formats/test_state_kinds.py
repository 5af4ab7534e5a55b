"""Optimizer state of any kind, offline: resharded and verified like weights, and refused where it has no place."""

from __future__ import annotations

import json
import random
from math import prod
from pathlib import Path
from typing import Any

import pytest

import reshard as api
from tests.builders import (
    Tensor,
    files_in,
    llama_config,
    llama_shapes,
    pack,
    random_tensors,
    refusal,
    reshard,
    tensors_in,
    write_model,
)
from tests.fast.reshard.forged import change_manifest, read_stage
from tests.fast.trained import STATE, write_moments

MATRICES = "model.layers.*_proj.weight"
BLANK = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.1}
OPTIMIZER: dict[str, Any] = {
    "name": "Adafactor",
    "max_norm": 0.5,
    "groups": [{**BLANK, "fqns": [MATRICES], "algorithm": "Muon", "rate_factor": 0.5}, BLANK],
    "kinds": [
        {"name": "momentum_buffer", "shape": "parameter", "groups": [0]},
        {"name": "row_var", "shape": "rows", "groups": [1]},
        {"name": "col_var", "shape": "columns", "groups": [1]},
        {"name": "variance", "shape": "vector", "groups": [1]},
        {"name": "mu_product", "shape": "scalar"},
        {"name": "ema", "shape": "parameter"},
    ],
    "ema": 0.999,
}


def shape_of(kind: str, fqn: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    is_muon = fqn.endswith("_proj.weight")
    if kind == "mu_product":
        return ()
    if kind == "ema":
        return shape
    if kind == "momentum_buffer":
        return shape if is_muon else None
    if is_muon or (len(shape) == 1) != (kind == "variance"):
        return None
    return {"variance": shape, "row_var": (*shape[:-1], 1), "col_var": (1, shape[-1])}[kind]


def write_state(folder: Path, layout: str, *, tied: bool) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Pack a model, and write random state of each kind beside its weights."""
    config, generator = llama_config(tie_word_embeddings=tied), random.Random(7)
    write_model(folder / "source", config, random_tensors(config, dtypes=["F32"]))
    out = pack(folder / "source", folder / "trained", layout)
    expected: dict[str, dict[str, Tensor]] = {kind["name"]: {} for kind in OPTIMIZER["kinds"]}
    for kind, tensors in expected.items():
        for fqn, whole in llama_shapes(config).items():
            if (shape := shape_of(kind, fqn, whole)) is not None:
                tensors[fqn] = Tensor(dtype="F32", shape=shape, data=generator.randbytes(4 * prod(shape)))
        if tied and (embedding := tensors.get("model.embed_tokens.weight")):
            tensors["lm_head.weight"] = embedding
    for index in range(len(json.loads((out / "manifest.json").read_text())["stages"])):
        names = read_stage(out, index).keys()
        for kind, tensors in expected.items():
            write_moments(out, index, kind, {fqn: tensors[fqn] for fqn in sorted(names) if fqn in tensors})
    change_manifest(out, lambda document: document.update(version=2, training={**STATE, "optimizer": OPTIMIZER}))
    return out, expected


@pytest.mark.parametrize("tied", [False, True])
def test_every_kind_is_resharded_with_its_weights(tmp_path: Path, tied: bool) -> None:
    trained, expected = write_state(tmp_path, "pp=2", tied=tied)
    out = pack(trained, tmp_path / "out", "pp=3")
    assert reshard("verify", out).code == 0, reshard("verify", out).out
    assert reshard("diff", trained, out).code == 0
    assert "of Muon and Adafactor and an average" in reshard("inspect", out).out
    stages = [api.open(str(out)).stage(index) for index in range(3)]
    for kind, tensors in expected.items():
        stored = {fqn: info.shape for stage in stages for fqn, info in stage.tensors(kind).items()}
        assert stored == {fqn: tensor.shape for fqn, tensor in tensors.items()}
    again = pack(out, tmp_path / "again", "pp=2")
    before, after = files_in(pack(trained, tmp_path / "first", "pp=2")), files_in(again)
    assert {name for name in after if after[name] != before.get(name)} == {"manifest.json"}
    assert json.loads(after["manifest.json"])["version"] == 2


def test_average_is_exported_in_place_of_the_weights(tmp_path: Path) -> None:
    trained, expected = write_state(tmp_path, "pp=2", tied=False)
    assert reshard("export", trained, "--to", "hf", "--weights", "ema", "--out", tmp_path / "out").code == 0
    assert tensors_in(tmp_path / "out") == expected["ema"]
    packed = pack(tmp_path / "source", tmp_path / "packed", "pp=1")
    refused = refusal("export", packed, "--to", "hf", "--weights", "ema", "--out", tmp_path / "other")
    assert refused.found[1] == "checkpoint.no-optimizer-state"


def test_state_that_its_kind_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    trained, expected = write_state(tmp_path, "pp=1", tied=False)
    rows = expected["row_var"]
    write_moments(trained, 0, "row_var", {**rows, "model.norm.weight": expected["variance"]["model.norm.weight"]})
    assert refusal("pack", trained, "--layout", "pp=2", "--out", tmp_path / "out").found[1] == "source.unknown-tensor"
    write_moments(trained, 0, "row_var", {fqn: rows[fqn] for fqn in list(rows)[1:]})
    assert refusal("pack", trained, "--layout", "pp=2", "--out", tmp_path / "out").found[1] == "source.missing-tensor"
    write_moments(trained, 0, "row_var", {**rows, "lm_head.weight": expected["ema"]["lm_head.weight"]})
    assert refusal("pack", trained, "--layout", "pp=2", "--out", tmp_path / "out").found[1] == "source.shape-mismatch"


@pytest.mark.parametrize("names", [(), ("--for", "torchtitan")])
def test_dcp_export_refuses_kinds_that_no_class_of_torch_has(tmp_path: Path, names: tuple[str, ...]) -> None:
    trained, _ = write_state(tmp_path, "pp=1", tied=False)
    refused = refusal("export", trained, "--to", "dcp", *names, "--out", tmp_path / "out")
    assert refused.found[1] == "checkpoint.other-optimizer"
    assert ("row_var" if names else "mu_product") in str(refused.text)


@pytest.mark.parametrize("target", ["universal", "megatron"])
def test_an_export_for_another_trainer_refuses_kinds_that_it_has_no_place_for(tmp_path: Path, target: str) -> None:
    trained, _ = write_state(tmp_path, "pp=1", tied=False)
    refused = refusal("export", trained, "--to", target, "--out", tmp_path / "out")
    assert refused.found[1] == "checkpoint.other-optimizer"
    assert "momentum_buffer" in str(refused.text)
