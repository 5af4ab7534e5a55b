"""Training checkpoints offline: optimizer state is resharded and verified like weights, and never exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import (
    EMBEDDING,
    HEAD,
    Tensor,
    files_in,
    flip,
    llama_config,
    pack,
    read_safetensors,
    refusal,
    reshard,
)
from tests.fast.trained import MOMENTS, STATE, random_moments, read_moments, write_moments, write_trained

UP, LAST_UP = "model.layers.1.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"
LAYOUTS = ("pp=1", "pp=2", "pp=4", "pp=2,vpp=2", "pp=2,style=v", "pp=3")


def manifest_of(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return document


def moments_in(out: Path) -> dict[tuple[int, str, str], Tensor]:
    """Return every moment by stage, kind and FQN; each kind is in a folder of its own."""
    found = {}
    for stage in manifest_of(out)["stages"]:
        for shard in stage["shards"]:
            if shard["holds"] == "weights":
                continue
            assert shard["path"] == f"stage-{stage['index']:03d}/{shard['holds']}/model.safetensors"
            for fqn, tensor in read_safetensors((out / shard["path"]).read_bytes()).items():
                found[stage["index"], shard["holds"], fqn] = tensor
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_state_is_resharded_with_its_weights(layout: str, tied: bool, tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=4", tie_word_embeddings=tied)
    out = pack(trained, tmp_path / "out", layout)
    assert reshard("verify", out).code == 0, reshard("verify", out).out
    expected, found = random_moments(llama_config(tie_word_embeddings=tied)), moments_in(out)
    for stage in manifest_of(out)["stages"]:
        weights = set[str]()
        for shard in stage["shards"]:
            if shard["holds"] == "weights":
                weights |= read_safetensors((out / shard["path"]).read_bytes()).keys()
        for moment in MOMENTS:
            here = {fqn for index, holds, fqn in found if (index, holds) == (stage["index"], moment)}
            assert here == weights
    assert {(holds, fqn) for _, holds, fqn in found} >= {(holds, fqn) for holds in MOMENTS for fqn in (EMBEDDING, UP)}
    assert all(tensor == expected[holds][fqn] for (_, holds, fqn), tensor in found.items())
    assert manifest_of(out)["training"] == STATE


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_back_restores_every_byte(layout: str, tied: bool, tmp_path: Path) -> None:
    trained = pack(write_trained(tmp_path, "pp=2", tie_word_embeddings=tied), tmp_path / "first", "pp=4")
    again = pack(pack(trained, tmp_path / "other", layout), tmp_path / "again", "pp=4")
    before, after = files_in(trained), files_in(again)
    assert {name for name in after if after[name] != before.get(name)} == {"manifest.json"}
    assert after.keys() == before.keys()


def test_damaged_optimizer_state_is_listed_by_verify_and_refused_by_pack(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    flipped, gone = trained / "stage-000/exp_avg/model.safetensors", trained / "stage-001/exp_avg_sq/model.safetensors"
    flip(flipped)
    refused = refusal("pack", trained, "--layout", "pp=1", "--out", tmp_path / "out")
    assert refused.found == (3, "shard.digest-mismatch", f"{flipped}: 'model.layers.1.self_attn.v_proj.weight'")
    gone.unlink()
    ended = reshard("verify", trained, "--json")
    assert ended.code == 4
    assert sorted(one["where"] for one in ended.json["differences"]) == [
        f"{flipped}: 'model.layers.1.self_attn.v_proj.weight'",
        str(gone),
    ]


def without_one(out: Path) -> None:
    tensors = read_moments(out, 1, "exp_avg")
    del tensors[LAST_UP]
    write_moments(out, 1, "exp_avg", tensors)


def with_stray(out: Path) -> None:
    stray = {"model.layers.3.mlp.side_proj.weight": Tensor(dtype="F32", shape=(1,), data=b"lost")}
    write_moments(out, 1, "exp_avg_sq", read_moments(out, 1, "exp_avg_sq") | stray)


def with_moved_one(out: Path) -> None:
    write_moments(
        out, 0, "exp_avg", read_moments(out, 0, "exp_avg") | {LAST_UP: read_moments(out, 1, "exp_avg")[LAST_UP]}
    )


def misshapen(out: Path) -> None:
    tensors = read_moments(out, 1, "exp_avg")
    tensors[LAST_UP] = replace(tensors[LAST_UP], shape=tensors[LAST_UP].shape[::-1])
    write_moments(out, 1, "exp_avg", tensors)


def with_copies_that_differ(out: Path) -> None:
    tensors = read_moments(out, 1, "exp_avg")
    tensors[HEAD] = replace(tensors[HEAD], data=bytes(len(tensors[HEAD].data)))
    write_moments(out, 1, "exp_avg", tensors)


def without_the_copy(out: Path) -> None:
    tensors = read_moments(out, 1, "exp_avg")
    del tensors[HEAD]
    write_moments(out, 1, "exp_avg", tensors)


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (without_one, "source.missing-tensor", ": exp_avg"),
        (
            with_stray,
            "shard.unknown-tensor",
            "/stage-001/exp_avg_sq/model.safetensors: 'model.layers.3.mlp.side_proj.weight'",
        ),
        (with_moved_one, "shard.wrong-stage", f"/stage-000/exp_avg/model.safetensors: '{LAST_UP}'"),
        (misshapen, "source.shape-mismatch", f"/stage-001/exp_avg/model.safetensors: '{LAST_UP}'.shape"),
        (with_copies_that_differ, "shard.tied-copies-differ", ": exp_avg: ties[0]"),
        (without_the_copy, "shard.missing-tensor", ": exp_avg: ties[0]"),
    ],
)
def test_optimizer_state_that_is_not_the_models_is_refused(
    change: Callable[[Path], None], code: str, where: str, tmp_path: Path
) -> None:
    trained = write_trained(tmp_path, "pp=2", tie_word_embeddings=True)
    change(trained)
    for verb in (("pack", trained, "--layout", "pp=4"), ("export", trained, "--to", "hf")):
        assert refusal(*verb, "--out", tmp_path / "out").found == (3, code, f"{trained}{where}")
        assert not (tmp_path / "out").exists()
    verified = reshard("verify", trained, "--json")
    assert (verified.code, [one["where"] for one in verified.json["differences"]]) == (4, [f"{trained}{where}"])
