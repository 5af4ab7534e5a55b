"""A manifest whose digests all fit and that still is not its model is refused, by pack, export and verify alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import EMBEDDING, HEAD, Tensor, leftovers, llama_config, reshard, write_model
from tests.fast.reshard.forged import change_file, change_manifest, change_stage, digest, read_stage

LAST = "stage-001/model.safetensors"
UP = "model.layers.3.mlp.up_proj.weight"
STRAY = "model.layers.3.mlp.side_proj.weight"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Pack a tied model into two stages."""
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True))
    packed = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out")
    assert packed.code == 0, packed.err
    return tmp_path / "out"


def refusal(out: Path) -> str:
    """Give the one sentence that pack and export refuse with and verify reports, without the folder's path."""
    again = out.parent / "again"
    packed = reshard("pack", out, "--layout", "pp=1", "--out", again)
    exported = reshard("export", out, "--to", "hf", "--out", again)
    verified = reshard("verify", out, "--json")
    assert (packed.code, exported.code, verified.code) == (3, 3, 4)
    assert packed.err == exported.err
    assert leftovers(again) == []
    sentence = packed.err.removeprefix("error: ").partition("\nhint: ")[0].rstrip("\n")
    assert [f"{one['where']}: {one['problem']}" for one in verified.json["differences"]] == [sentence]
    return sentence.replace(str(out), "OUT")


def test_forging_a_stage_unchanged_changes_nothing(out: Path) -> None:
    change_stage(out, 1, lambda tensors: None)
    assert reshard("verify", out).code == 0


def test_stray_tensor_in_a_bundle(out: Path) -> None:
    change_stage(out, 1, lambda tensors: tensors.update({STRAY: Tensor(dtype="U8", shape=(4,), data=b"lost")}))
    assert refusal(out) == f"OUT/{LAST}: '{STRAY}': the source had no such tensor (source.json)"


def test_missing_tensor(out: Path) -> None:
    change_stage(out, 1, lambda tensors: tensors.pop(UP))
    assert refusal(out) == f"OUT/manifest.json: 1 tensor of the model missing: {UP}"


def test_tensor_on_a_stage_that_does_not_hold_its_module(out: Path) -> None:
    moved = read_stage(out, 1)[UP]
    change_stage(out, 1, lambda tensors: tensors.pop(UP))
    change_stage(out, 0, lambda tensors: tensors.update({UP: moved}))
    assert refusal(out) == f"OUT/stage-000/model.safetensors: '{UP}': belongs to no module of stage 0"


def test_tensor_in_two_shards(out: Path) -> None:
    def repeat(document: dict[str, Any]) -> None:
        stage = document["stages"][1]
        stage["shards"].append({**stage["shards"][0], "path": "stage-001/more.safetensors"})

    (out / "stage-001" / "more.safetensors").write_bytes((out / LAST).read_bytes())
    change_manifest(out, repeat)
    assert refusal(out).endswith(": is in two shards")


def test_tensor_of_another_shape(out: Path) -> None:
    change_stage(out, 1, lambda tensors: tensors.update({UP: replace(tensors[UP], shape=(16, 24))}))
    assert refusal(out) == f"OUT/{LAST}: '{UP}'.shape: expected [24, 16] (config.json), found [16, 24]"


def test_tied_copies_that_differ(out: Path) -> None:
    owner, other = read_stage(out, 0)[EMBEDDING], replace(read_stage(out, 0)[EMBEDDING], data=bytes(1280))
    change_stage(out, 1, lambda tensors: tensors.update({HEAD: other}))
    told = ", ".join(
        f"{fqn} on stage {stage} BF16 {digest(tensor.data).removeprefix('blake3:')}"
        for fqn, stage, tensor in ((EMBEDDING, 0, owner), (HEAD, 1, other))
    )
    assert refusal(out) == f"OUT/manifest.json: ties[0]: expected equal copies, found {told}"


def test_tied_copy_that_its_stage_lacks(out: Path) -> None:
    change_stage(out, 1, lambda tensors: tensors.pop(HEAD))
    assert refusal(out) == f"OUT/manifest.json: ties[0]: no shard of stage 1 holds '{HEAD}'"


@pytest.mark.parametrize("field", ["num_tensors", "nbytes"])
def test_counts_that_the_shards_do_not_bear_out(field: str, out: Path) -> None:
    found = json.loads((out / "manifest.json").read_text())["stages"][1][field]
    change_manifest(out, lambda document: document["stages"][1].update({field: found - 1}))
    assert refusal(out) == f"OUT/manifest.json: stages[1].{field}: expected {found} (its shards), found {found - 1}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda document: document["stages"][0]["modules"].pop(),
            "stages: no stage holds model.layers.1",
        ),
        (
            lambda document: document["stages"][1]["modules"].reverse(),
            "stages: 'lm_head' stands where the model of config.json has another module",
        ),
        (
            lambda document: document.update(ties=[]),
            f"ties: expected {EMBEDDING} = {HEAD} (config.json)",
        ),
        (
            lambda document: document["model"].update(num_layers=5),
            "model.num_layers: expected 4 (config.json), found 5",
        ),
        (
            lambda document: document.update(
                files=[file for file in document["files"] if file["path"] != "config.json"]
            ),
            "files: config.json is not among them",
        ),
        (
            lambda document: document.update(
                files=[file for file in document["files"] if file["path"] != "source.json"]
            ),
            "files: source.json is not among them",
        ),
    ],
)
def test_manifest_that_is_not_its_config(change: Callable[[dict[str, Any]], object], message: str, out: Path) -> None:
    change_manifest(out, change)
    assert refusal(out) == f"OUT/manifest.json: {message}"


def test_config_of_another_model(out: Path) -> None:
    change_file(out, "config.json", json.dumps(llama_config(num_hidden_layers=3)).encode())
    assert refusal(out).startswith("OUT/manifest.json: 4 problems:\n  model.num_layers: expected 3 ")


def test_small_file_with_the_name_of_a_shard(out: Path) -> None:
    (out / "model.safetensors").write_bytes(b"")
    file = {"path": "model.safetensors", "nbytes": 0, "digest": digest(b"")}
    change_manifest(out, lambda document: document["files"].append(file))
    assert refusal(out) == "OUT/manifest.json: files[4].path: 'model.safetensors' is a weight file of the source"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.pop("format"), ": expected format 'reshard-source', version 1"),
        (lambda document: document.update(version=True), ": expected format 'reshard-source', version 1"),
        (lambda document: document.update(note=""), ": note: is no field of version 1"),
        (lambda document: document.pop("dropped"), ": dropped: expected a list of strings"),
        (lambda document: document.update(dropped=[1]), ": dropped: expected a list of strings"),
        (lambda document: document.update(dropped=["ghost"]), ": dropped: 'ghost' is in no shard"),
        (lambda document: document.update(index=1), ": index: expected a string or null"),
        (
            lambda document: document.update(shards={}),
            ": shards: expected a list of objects with name and header, both strings",
        ),
        (
            lambda document: document["shards"][0].update(name=1),
            ": shards: expected a list of objects with name and header, both strings",
        ),
        (
            lambda document: document["shards"][0].update(name="../../.bashrc"),
            ": shards[0].name: expected a path that stays below its folder",
        ),
        (
            lambda document: document["shards"][0].update(name=".bashrc"),
            ": shards[0].name: expected a .safetensors file of its own, found '.bashrc'",
        ),
        (
            lambda document: document["shards"].append(document["shards"][0]),
            ": shards[1].name: expected a .safetensors file of its own, found 'model.safetensors'",
        ),
        (
            lambda document: document["shards"].append({**document["shards"][0], "name": "b.safetensors"}),
            f": shards[1].header: '{EMBEDDING}': is in two shards",
        ),
        (
            lambda document: document["shards"][0].update(header='{"a": []}'),
            ": model.safetensors: 'a': expected an object with dtype, shape and data_offsets",
        ),
        (
            lambda document: document["shards"][0].update(header='{"a": {"data_offsets": "ab"}}'),
            ": model.safetensors: 'a': expected an object with dtype, shape and data_offsets",
        ),
        (
            lambda document: document["shards"][0].update(header='{"\\ud800": {}}'),
            ": model.safetensors: header: is not JSON: 'utf-8' codec can't encode character '\\ud800' in position 2: "
            "surrogates not allowed",
        ),
    ],
)
def test_source_record_that_lies(change: Callable[[dict[str, Any]], object], message: str, out: Path) -> None:
    document = json.loads((out / "source.json").read_text())
    change(document)
    change_file(out, "source.json", json.dumps(document).encode())
    assert refusal(out).removeprefix("OUT/").removeprefix("source.json") == message


def test_manifest_that_is_none_is_refused_by_every_verb(out: Path) -> None:
    change_manifest(out, lambda document: document["stages"][0]["shards"][0].update(digest="blake3:"))
    message = (
        f"error: {out}/manifest.json: stages[0].shards[0].digest: expected blake3: and 64 hex digits, found 'blake3:'\n"
    )
    for args in (
        ("pack", out, "--layout", "pp=1", "--out", out.parent / "again"),
        ("plan", out, "--layout", "pp=1"),
        ("export", out, "--to", "hf", "--out", out.parent / "again"),
        ("verify", out),
        ("inspect", out),
    ):
        ended = reshard(*args)
        assert (ended.code, ended.out, ended.err) == (3, "", message)
    assert leftovers(out.parent / "again") == []
