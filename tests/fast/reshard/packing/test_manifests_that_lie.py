"""A manifest whose digests all fit and that still is not its model is refused, by pack, export and verify alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import EMBEDDING, HEAD, Tensor, leftovers, llama_config, pack, refusal, reshard, write_model
from tests.fast.reshard.forged import change_file, change_manifest, change_stage, digest, read_stage

FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
UP = "model.layers.3.mlp.up_proj.weight"
STRAY = "model.layers.3.mlp.side_proj.weight"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Pack a tied model into two stages."""
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True))
    return pack(tmp_path / "source", tmp_path / "out")


def refused(out: Path) -> tuple[str, str]:
    """Return code and place, without the folder's path, with which pack and export refuse; verify reports the same."""
    again = out.parent / "again"
    packed = refusal("pack", out, "--layout", "pp=1", "--out", again)
    assert packed == refusal("export", out, "--to", "hf", "--out", again)
    exit_code, code, where = packed.found
    verified = reshard("verify", out, "--json")
    assert (exit_code, verified.code) == (3, 4)
    assert leftovers(again) == []
    (one,) = [difference for difference in verified.json["differences"] if "code" not in difference]
    assert packed.text.startswith(f"{one['where']}: {one['problem']}")
    assert one["where"] == where
    return code, where.removeprefix(f"{out}/")


def test_forging_a_stage_unchanged_changes_nothing(out: Path) -> None:
    change_stage(out, 1, lambda tensors: None)
    assert reshard("verify", out).code == 0


def test_stray_tensor_in_a_bundle(out: Path) -> None:
    change_stage(out, 1, lambda tensors: tensors.update({STRAY: Tensor(dtype="U8", shape=(4,), data=b"lost")}))
    assert refused(out) == ("shard.unknown-tensor", f"{LAST}: '{STRAY}'")


def test_missing_tensor(out: Path) -> None:
    change_stage(out, 1, lambda tensors: tensors.pop(UP))
    assert refused(out) == ("source.missing-tensor", "manifest.json")


def test_tensor_on_a_stage_that_does_not_have_its_module(out: Path) -> None:
    moved = read_stage(out, 1)[UP]
    change_stage(out, 1, lambda tensors: tensors.pop(UP))
    change_stage(out, 0, lambda tensors: tensors.update({UP: moved}))
    assert refused(out) == ("shard.wrong-stage", f"{FIRST}: '{UP}'")


def test_tensor_in_two_shards(out: Path) -> None:
    def repeat(document: dict[str, Any]) -> None:
        stage = document["stages"][1]
        stage["shards"].append({**stage["shards"][0], "path": "stage-001/more.safetensors"})

    (out / "stage-001").mkdir(exist_ok=True)
    (out / "stage-001" / "more.safetensors").write_bytes((out / LAST).read_bytes())
    change_manifest(out, repeat)
    assert refused(out)[0] == "shard.inconsistent-slices"


def test_tied_copies_that_differ(out: Path) -> None:
    other = replace(read_stage(out, 0)[EMBEDDING], data=bytes(1280))
    change_stage(out, 1, lambda tensors: tensors.update({HEAD: other}))
    assert refused(out) == ("shard.tied-copies-differ", "manifest.json: ties[0]")


def test_tied_copy_that_its_stage_lacks(out: Path) -> None:
    change_stage(out, 1, lambda tensors: tensors.pop(HEAD))
    assert refused(out) == ("shard.missing-tensor", "manifest.json: ties[0]")


@pytest.mark.parametrize("field", ["num_tensors", "nbytes"])
def test_counts_that_do_not_match_the_shards(field: str, out: Path) -> None:
    found = json.loads((out / "manifest.json").read_text())["stages"][1][field]
    change_manifest(out, lambda document: document["stages"][1].update({field: found - 1}))
    assert refused(out) == ("manifest.wrong-count", f"manifest.json: stages[1].{field}")


def without_file(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.update(files=[file for file in document["files"] if file["path"] != name])


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda document: document["stages"][0]["modules"].pop(), "inconsistent", "stages"),
        (lambda document: document["stages"][1]["modules"].reverse(), "inconsistent", "stages"),
        (lambda document: document.update(ties=[]), "inconsistent", "ties"),
        (lambda document: document["model"].update(num_layers=5), "inconsistent", "model.num_layers"),
        (without_file("config.json"), "missing-file", "files"),
        (without_file("source.json"), "missing-file", "files"),
    ],
)
def test_manifest_that_is_not_its_config(
    change: Callable[[dict[str, Any]], object], code: str, where: str, out: Path
) -> None:
    change_manifest(out, change)
    assert refused(out) == (f"manifest.{code}", f"manifest.json: {where}")


def test_config_of_another_model(out: Path) -> None:
    change_file(out, "config.json", json.dumps(llama_config(num_hidden_layers=3)).encode())
    assert refused(out) == ("manifest.inconsistent", "manifest.json")


def test_auxiliary_file_with_the_name_of_a_shard(out: Path) -> None:
    (out / "model.safetensors").write_bytes(b"")
    file = {"path": "model.safetensors", "nbytes": 0, "digest": digest(b"")}
    change_manifest(out, lambda document: document["files"].append(file))
    assert refused(out) == ("manifest.source-mismatch", "manifest.json: files[4].path")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda document: document.pop("format"), ""),
        (lambda document: document.update(version=True), ""),
        (lambda document: document.update(note=""), ": note"),
        (lambda document: document.pop("dropped"), ": dropped"),
        (lambda document: document.update(dropped=[1]), ": dropped"),
        (lambda document: document.update(dropped=["ghost"]), ": dropped"),
        (lambda document: document.update(index=1), ": index"),
        (lambda document: document.pop("index"), ": index"),
        (lambda document: document.update(shards={}), ": shards"),
        (lambda document: document["shards"][0].update(name=1), ": shards"),
        (lambda document: document["shards"][0].update(name="../../.bashrc"), ": shards[0].name"),
        (lambda document: document["shards"][0].update(name=".bashrc"), ": shards[0].name"),
        (lambda document: document["shards"].append(document["shards"][0]), ": shards[1].name"),
        (
            lambda document: document["shards"].append({**document["shards"][0], "name": "b.safetensors"}),
            f": shards[1].header: '{EMBEDDING}'",
        ),
    ],
)
def test_source_record_that_lies(change: Callable[[dict[str, Any]], object], where: str, out: Path) -> None:
    document = json.loads((out / "source.json").read_text())
    change(document)
    change_file(out, "source.json", json.dumps(document).encode())
    assert refused(out) == ("manifest.bad-source-record", f"source.json{where}")


@pytest.mark.parametrize(
    ("header", "code", "where"),
    [
        ('{"a": []}', "header.invalid-field", "'a'"),
        ('{"a": {"data_offsets": "ab"}}', "header.invalid-field", "'a'"),
        ('{"\\ud800": {}}', "source.not-json", "header"),
    ],
)
def test_header_in_a_source_record_that_lies(header: str, code: str, where: str, out: Path) -> None:
    document = json.loads((out / "source.json").read_text())
    document["shards"][0]["header"] = header
    change_file(out, "source.json", json.dumps(document).encode())
    assert refused(out) == (code, f"source.json: model.safetensors: {where}")


def test_manifest_that_is_none_is_refused_by_every_verb(out: Path) -> None:
    change_manifest(out, lambda document: document["stages"][0]["shards"][0].update(digest="blake3:"))
    for args in (
        ("pack", out, "--layout", "pp=1", "--out", out.parent / "again"),
        ("plan", out, "--layout", "pp=1"),
        ("export", out, "--to", "hf", "--out", out.parent / "again"),
        ("verify", out),
        ("inspect", out),
    ):
        assert refusal(*args).found == (3, "manifest.inconsistent", f"{out}/manifest.json: stages[0].shards[0].digest")
    assert leftovers(out.parent / "again") == []
