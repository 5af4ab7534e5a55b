"""Virtual bundles: no byte is copied, none is lost, and none is taken from a file that changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stores.open import open_manifest
from tests.builders import (
    Tensor,
    files_in,
    flip,
    leftovers,
    llama_config,
    random_tensors,
    read_safetensors,
    refusal,
    reshard,
    without_digest,
    write_model,
)
from tests.fast.reshard.drawn_folders import Folder, folders, specs
from tests.fast.reshard.forged import change_file, change_manifest

SECOND = "model-00002-of-00003.safetensors"


def run(*args: str | Path) -> str:
    ended = reshard(*args)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Lay a tied model, in three files, onto two stages without copying it."""
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True), num_shards=3)
    run("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "out")
    return tmp_path / "out"


@settings(max_examples=15)
@given(folders(), st.data())
def test_virtual_bundles_become_the_bundles_that_packing_their_source_gives(
    folder: Folder, data: st.DataObject
) -> None:
    with TemporaryDirectory() as place:
        source, virtual, real, fresh, exported = (Path(place, name) for name in ("s", "v", "r", "f", "e"))
        folder.write(source)
        spec = data.draw(specs(folder.config["num_hidden_layers"], Path(place)))
        run("pack", source, "--layout", spec, "--virtual", "--out", virtual)
        run("pack", virtual / "manifest.json", "--out", real)
        run("pack", source, "--layout", spec, "--out", fresh)
        run("export", virtual, "--to", "hf", "--out", exported)
        packed, expected = files_in(real), files_in(fresh)
        manifest = json.loads(without_digest(packed.pop("manifest.json")))
        assert [parent.pop("location") for parent in manifest["parents"]] == [str(virtual)]
        assert manifest | {"parents": []} == json.loads(without_digest(expected.pop("manifest.json")))
        assert packed == expected
        assert files_in(exported) == folder.files


@settings(max_examples=15)
@given(folders(), st.data())
def test_resharding_virtual_bundles_equals_packing_their_source(folder: Folder, data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        source, first, again, fresh = (Path(place, name) for name in ("source", "first", "again", "fresh"))
        folder.write(source)
        num_layers = folder.config["num_hidden_layers"]
        run("pack", source, "--layout", data.draw(specs(num_layers, Path(place))), "--virtual", "--out", first)
        spec = data.draw(specs(num_layers, Path(place)))
        run("pack", first, "--layout", spec, "--virtual", "--out", again)
        run("pack", source, "--layout", spec, "--virtual", "--out", fresh)
        packed, expected = files_in(again), files_in(fresh)
        assert json.loads(without_digest(packed.pop("manifest.json"))) | {"parents": []} == json.loads(
            without_digest(expected.pop("manifest.json"))
        )
        assert packed == expected


def test_inspect_and_plan_read_virtual_bundles(out: Path) -> None:
    copies = out.parent / "copies"
    run("pack", out, "--out", copies)
    text = run("inspect", out)
    assert f"virtual: stages 0-1 reference 3 files in {out.parent}/source\n" in text
    rows, expected = (json.loads(run("inspect", place, "--tensors", "--json"))["tensors"] for place in (out, copies))
    for row in expected:
        row["blake3"] = None
    assert sorted(rows, key=str) == sorted(expected, key=str)
    assert run("plan", out, "--json") == run("plan", out.parent / "source", "--layout", "pp=2", "--json")


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def flip_data(file: Path) -> None:
    flip(file)


def rename_a_tensor(file: Path) -> None:
    """Change the header, and neither size nor time."""
    was = file.stat()
    file.write_bytes(file.read_bytes().replace(b"layers.0.mlp.down_proj", b"layers.0.mlp.done_proj"))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (grow, "source.changed"),
        (flip_data, "source.changed"),
        (os.utime, "source.changed"),
        (rename_a_tensor, "source.changed"),
        (Path.unlink, "store.unreadable"),
    ],
)
def test_changed_original_is_refused_by_its_name(change: Callable[[Path], object], code: str, out: Path) -> None:
    file = out.parent / "source" / SECOND
    change(file)
    for command in (
        ("pack", out, "--out", out.parent / "new"),
        ("pack", out, "--virtual", "--out", out.parent / "new"),
        ("export", out, "--to", "hf", "--out", out.parent / "new"),
        ("plan", out, "--layout", "pp=1"),
        ("inspect", out, "--tensors"),
    ):
        assert refusal(*command).found == (3, code, str(file))
    assert leftovers(out.parent / "new") == []
    for flags in ((), ("--quick",)):
        verified = reshard("verify", out, "--json", *flags)
        assert (verified.code, [one["where"] for one in verified.json["differences"]]) == (4, [str(file)])


def test_file_that_no_stage_refers_to_may_change(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config())
    run("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "out")
    (tmp_path / "source" / "tokenizer.json").unlink()
    run("pack", tmp_path / "out", "--out", tmp_path / "real")
    assert (tmp_path / "real" / "tokenizer.json").exists()


def cut_a_tensor(document: dict[str, Any]) -> None:
    stage = document["stages"][0]
    stage["spans"][0]["begin"] += 2
    stage["nbytes"] -= 2


def swap_stages(document: dict[str, Any]) -> None:
    first, second = document["stages"]
    for field in ("spans", "nbytes", "num_tensors"):
        first[field], second[field] = second[field], first[field]


def leave_out_a_span(document: dict[str, Any]) -> None:
    stage = document["stages"][0]
    span = stage["spans"].pop()
    stage["nbytes"] -= span["end"] - span["begin"]


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (cut_a_tensor, "wrong-span", "stages[0].spans: SOURCE/model-00001-of-00003.safetensors"),
        (swap_stages, "wrong-span", "SOURCE/model-00001-of-00003.safetensors: 'model.layers.2."),
        (leave_out_a_span, "wrong-count", "OUT/manifest.json: stages[0].num_tensors"),
        (lambda document: document["ties"].clear(), "inconsistent", "OUT/manifest.json: stages[0].spans"),
        (
            lambda document: document["virtual"]["files"][0].update(path="model.safetensors"),
            "source-mismatch",
            "OUT/manifest.json: virtual.files[0]",
        ),
        (
            lambda document: document["virtual"]["files"][1].update(digest="blake3:" + 64 * "0"),
            "source-mismatch",
            "OUT/manifest.json: virtual.files[1]",
        ),
    ],
)
def test_virtual_manifest_that_lies_is_refused(
    change: Callable[[dict[str, Any]], object], code: str, where: str, out: Path
) -> None:
    change_manifest(out, change)
    exit_code, found, place = refusal("pack", out, "--out", out.parent / "new").found
    assert (exit_code, found) == (3, f"manifest.{code}")
    assert place.replace(str(out.parent / "source"), "SOURCE").replace(str(out), "OUT").startswith(where)
    assert reshard("verify", out).code in (3, 4)
    assert leftovers(out.parent / "new") == []


def test_source_record_of_another_source_is_refused(out: Path) -> None:
    record = json.loads((out / "source.json").read_text())
    record["shards"][0]["header"] += " "
    change_file(out, "source.json", json.dumps(record).encode())
    refused = refusal("pack", out, "--out", out.parent / "new")
    assert refused.found == (3, "manifest.source-mismatch", f"{out}/manifest.json: virtual.files[0]")


def test_tensor_without_bytes_cannot_be_virtual(tmp_path: Path, wording: Callable[[str], None]) -> None:
    name = "model.layers.3.self_attn.rotary_emb.inv_freq"
    tensors = random_tensors(llama_config()) | {name: Tensor(dtype="F32", shape=(0,), data=b"")}
    write_model(tmp_path / "source", llama_config(), tensors)
    refused = refusal("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "out")
    where = f"{tmp_path}/source/model.safetensors: '{name}'"
    assert refused.found == (3, "options.cannot-be-virtual", where)
    wording(refused.text)


def test_bundles_that_a_checkpoint_has_cannot_be_virtual(tmp_path: Path, wording: Callable[[str], None]) -> None:
    """The hint must not lead to another model, such as the untrained one that a checkpoint began with."""
    write_model(tmp_path / "source", llama_config())
    run("pack", tmp_path / "source", "--layout", "pp=1", "--out", tmp_path / "packed")
    refused = refusal("pack", tmp_path / "packed", "--layout", "pp=2", "--virtual", "--out", tmp_path / "out")
    assert refused.found == (3, "options.cannot-be-virtual", f"{tmp_path}/packed/model-00001-of-00001.safetensors")
    wording(refused.text)


def test_two_stored_copies_of_a_tied_weight_that_differ_have_spans_of_their_own(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config | {"tie_word_embeddings": False})
    write_model(source, config, tensors)
    run("pack", source, "--layout", "pp=2", "--virtual", "--out", out, "--quiet")
    manifest = open_manifest(out).manifest
    assert (manifest.ties, sum(stage.num_tensors for stage in manifest.stages)) == ((), len(tensors))
    run("verify", out, "--against", source)


def test_chosen_stages_are_packed_and_the_others_are_virtual(tmp_path: Path) -> None:
    source, whole, part = (tmp_path / name for name in ("source", "whole", "part"))
    write_model(source, llama_config(tie_word_embeddings=True), num_shards=3)
    run("pack", source, "--layout", "pp=4", "--out", whole)
    run("pack", source, "--layout", "pp=4", "--stages", "0,2-3", "--out", part)
    found, expected = open_manifest(part).manifest.stages, open_manifest(whole).manifest.stages
    assert [bool(stage.spans) for stage in found] == [False, True, False, False]
    assert [replace(stage, shards=()) for stage in found[0::2]] == [
        replace(stage, shards=()) for stage in expected[0::2]
    ]
    for stage in (0, 2):
        (in_root,) = expected[stage].shards
        alone = f"stage-{stage:03d}/model.safetensors"
        assert found[stage].shards == (replace(in_root, path=alone),)
        assert (part / alone).read_bytes() == (whole / in_root.path).read_bytes()
    with_replica = read_safetensors((part / "stage-003/model.safetensors").read_bytes())
    assert with_replica == {
        fqn: tensor
        for shard in expected[3].shards
        for fqn, tensor in read_safetensors((whole / shard.path).read_bytes()).items()
    }
    assert not (part / "stage-001").exists()
    run("export", part, "--to", "hf", "--out", tmp_path / "exported")
    assert files_in(tmp_path / "exported") == files_in(source)
    run("pack", part, "--out", tmp_path / "rest")
    assert files_in(tmp_path / "rest") | {"manifest.json": b""} == files_in(whole) | {"manifest.json": b""}
    run("pack", part, "--stages", "0-3", "--out", tmp_path / "all")
    assert open_manifest(tmp_path / "all").manifest.virtual is None


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--stages", "4"), "options.unknown-stage"),
        (("--stages", "1-"), "options.bad-stages"),
        (("--stages", "0,3-1"), "options.bad-stages"),
        (("--stages", "1", "--virtual"), "options.conflict"),
    ],
)
def test_stages_that_make_no_sense_are_a_usage_error(
    flags: tuple[str, ...], code: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    write_model(tmp_path / "source", llama_config())
    refused = refusal("pack", tmp_path / "source", "--layout", "pp=4", "--out", tmp_path / "out", *flags)
    assert refused.found == (2, code, "--stages")
    wording(refused.text)
    assert leftovers(tmp_path / "out") == []
