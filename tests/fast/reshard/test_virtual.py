"""Virtual bundles: no byte is copied, none is lost, and none is taken from a file that changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.store import read_manifest
from tests.builders import (
    Tensor,
    files_in,
    leftovers,
    llama_config,
    random_tensors,
    reshard,
    without_digest,
    write_model,
)
from tests.fast.reshard.drawn_folders import Folder, folders, specs
from tests.fast.reshard.forged import change_file, change_manifest, digest

SECOND = "model-00002-of-00003.safetensors"
HINT = "the source changed after the manifest was written; write that again with reshard pack --virtual"


def run(*args: str | Path) -> str:
    ended = reshard(*args)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def refusal(*args: str | Path) -> tuple[int, str]:
    """Give the code and the sentence of a refusal that leaves nothing behind."""
    ended = reshard(*args)
    assert ended.out == ""
    return ended.code, ended.err


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Lay a tied model, in three files, onto two stages without copying it."""
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True), num_shards=3)
    run("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "out")
    return tmp_path / "out"


@settings(max_examples=60)
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


@settings(max_examples=25)
@given(folders(), st.data())
def test_laying_virtual_bundles_out_anew_equals_laying_out_their_source(folder: Folder, data: st.DataObject) -> None:
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


def test_only_the_manifest_and_small_files_are_written(out: Path) -> None:
    files = files_in(out)
    assert set(files) == {"manifest.json", "source.json", "config.json", "generation_config.json", "tokenizer.json"}
    manifest = read_manifest(out)
    assert manifest.virtual is not None
    assert (manifest.virtual.location, manifest.virtual.revision) == (str(out.parent / "source"), None)
    assert [file.path for file in manifest.virtual.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [stage.nbytes for stage in manifest.stages] == [
        sum(span.end - span.begin for span in stage.spans) for stage in manifest.stages
    ]


def test_pack_says_what_it_left_where_it_is(out: Path) -> None:
    again = ("pack", out, "--virtual", "--force", "--out", out)
    assert run(*again).splitlines()[0] == (
        f"packed 39 tensors, 0 B, and left 17.78 KiB where they are, in 2 stages: {out}/manifest.json"
    )
    assert json.loads(run(*again, "--json")) == {
        "version": 1,
        "manifest": f"{out}/manifest.json",
        "num_stages": 2,
        "num_ranks": 2,
        "num_tensors": 39,
        "nbytes": 0,
        "virtual_nbytes": 18208,
    }


def test_inspect_and_plan_read_virtual_bundles(out: Path) -> None:
    copies = out.parent / "copies"
    run("pack", out, "--out", copies)
    text = run("inspect", out)
    assert f"virtual: stages 0-1 are bytes of 3 files in {out.parent}/source\n" in text
    rows, expected = (json.loads(run("inspect", place, "--tensors", "--json"))["tensors"] for place in (out, copies))
    for row in expected:
        row["blake3"] = None
    assert sorted(rows, key=str) == sorted(expected, key=str)
    assert run("plan", out, "--json") == run("plan", out.parent / "source", "--layout", "pp=2", "--json")


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def flip_data(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def rename_a_tensor(file: Path) -> None:
    """Change the header, and neither size nor time."""
    was = file.stat()
    file.write_bytes(file.read_bytes().replace(b"layers.0.mlp.down_proj", b"layers.0.mlp.done_proj"))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (grow, "expected 8630 bytes (virtual.files of manifest.json), found 8631 bytes"),
    (
        flip_data,
        "expected 8630 bytes, changed at WAS (virtual.files of manifest.json), found 8630 bytes, changed at IS",
    ),
    (os.utime, "expected 8630 bytes, changed at WAS (virtual.files of manifest.json), found 8630 bytes, changed at IS"),
    (rename_a_tensor, "expected header WAS (virtual.files of manifest.json), found header IS"),
    (Path.unlink, "cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("change", "problem"), CHANGES)
def test_changed_original_is_refused_by_its_name(change: Callable[[Path], object], problem: str, out: Path) -> None:
    file = out.parent / "source" / SECOND

    def state() -> str:
        if "header" in problem:
            data = file.read_bytes()
            return digest(data[: 8 + int.from_bytes(data[:8], "little")])
        return str(file.stat().st_mtime_ns)

    was = state()
    change(file)
    if file.exists():
        problem = problem.replace("WAS", was).replace("IS", state())
    hint = f"hint: {HINT}\n" if file.exists() else ""
    expected = (3, f"error: {file}: {problem}\n{hint}")
    assert refusal("pack", out, "--out", out.parent / "new") == expected
    assert refusal("pack", out, "--virtual", "--out", out.parent / "new") == expected
    assert refusal("export", out, "--to", "hf", "--out", out.parent / "new") == expected
    assert refusal("plan", out, "--layout", "pp=1") == expected
    assert refusal("inspect", out, "--tensors") == expected
    assert leftovers(out.parent / "new") == []
    for flags in ((), ("--quick",)):
        verified = reshard("verify", out, "--json", *flags)
        assert verified.code == 4
        assert verified.json["differences"] == [{"where": str(file), "problem": problem}]


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
    ("change", "problem"),
    [
        (
            cut_a_tensor,
            "stages[0].spans: SOURCE/model-00001-of-00003.safetensors: bytes 1450 to 4840 are not whole tensors",
        ),
        (swap_stages, "SOURCE/model-00001-of-00003.safetensors: 'model.layers.2."),
        (leave_out_a_span, "OUT/manifest.json: stages[0].num_tensors: expected "),
        (lambda document: document["ties"].clear(), "OUT/manifest.json: stages[0].spans: overlap those of "),
        (
            lambda document: document["virtual"]["files"][0].update(path="model.safetensors"),
            "OUT/manifest.json: virtual.files[0]: source.json has no 'model.safetensors' with the header blake3:",
        ),
        (
            lambda document: document["virtual"]["files"][1].update(digest="blake3:" + 64 * "0"),
            f"OUT/manifest.json: virtual.files[1]: source.json has no '{SECOND}' with the header blake3:000",
        ),
    ],
)
def test_virtual_manifest_that_lies_is_refused(
    change: Callable[[dict[str, Any]], object], problem: str, out: Path
) -> None:
    change_manifest(out, change)
    code, said = refusal("pack", out, "--out", out.parent / "new")
    assert code == 3
    assert said.replace(str(out.parent / "source"), "SOURCE").replace(str(out), "OUT").startswith(f"error: {problem}")
    assert reshard("verify", out).code in (3, 4)
    assert leftovers(out.parent / "new") == []


def test_carried_record_of_another_source_is_refused(out: Path) -> None:
    record = json.loads((out / "source.json").read_text())
    record["shards"][0]["header"] += " "
    change_file(out, "source.json", json.dumps(record).encode())
    assert "virtual.files[0]: source.json has no " in refusal("pack", out, "--out", out.parent / "new")[1]


def test_copies_have_no_originals_to_refer_to(out: Path) -> None:
    copies = out.parent / "copies"
    run("pack", out, "--out", copies)
    expected = (
        3,
        f"error: {copies}/stage-000/model.safetensors: is no weight file of a Hugging Face folder, "
        "and virtual bundles refer to nothing else\n"
        f"hint: give as SOURCE what it was made from ({out.parent}/source), or pack without --virtual\n",
    )
    assert refusal("pack", copies, "--virtual", "--out", out.parent / "new") == expected
    assert refusal("pack", copies, "--stages", "1", "--out", out.parent / "new") == expected
    assert leftovers(out.parent / "new") == []


def test_tensor_without_bytes_cannot_be_referred_to(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.rotary_emb.inv_freq"
    tensors = random_tensors(llama_config()) | {name: Tensor(dtype="F32", shape=(0,), data=b"")}
    write_model(tmp_path / "source", llama_config(), tensors)
    assert refusal("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "out") == (
        3,
        f"error: {tmp_path}/source/model.safetensors: '{name}': has no bytes that a virtual bundle could refer to\n"
        "hint: pack without --virtual\n",
    )


def test_two_stored_copies_of_a_tied_weight_are_compared_first(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    write_model(tmp_path / "source", config, random_tensors(config | {"tie_word_embeddings": False}))
    code, said = refusal("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "out")
    assert code == 3
    assert "the files store different values for them" in said


def test_chosen_stages_are_packed_and_the_others_are_virtual(tmp_path: Path) -> None:
    source, whole, part = (tmp_path / name for name in ("source", "whole", "part"))
    write_model(source, llama_config(tie_word_embeddings=True), num_shards=3)
    run("pack", source, "--layout", "pp=4", "--out", whole)
    run("pack", source, "--layout", "pp=4", "--stages", "0,2-3", "--out", part)
    found, expected = read_manifest(part).stages, read_manifest(whole).stages
    assert [bool(stage.spans) for stage in found] == [False, True, False, False]
    assert found[0::2] == expected[0::2]
    kept = {"stage-000", "stage-002", "stage-003"}
    bundles = {name: data for name, data in files_in(whole).items() if name.partition("/")[0] in kept}
    assert len(bundles) == 3
    assert bundles.items() <= files_in(part).items()
    assert not (part / "stage-001").exists()
    run("export", part, "--to", "hf", "--out", tmp_path / "exported")
    assert files_in(tmp_path / "exported") == files_in(source)
    run("pack", part, "--out", tmp_path / "rest")
    assert files_in(tmp_path / "rest") | {"manifest.json": b""} == files_in(whole) | {"manifest.json": b""}
    run("pack", part, "--stages", "0-3", "--out", tmp_path / "all")
    assert read_manifest(tmp_path / "all").virtual is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--stages", "4"), "--stages: there is no stage 4: the layout has 4"),
        (("--stages", "1-"), "--stages: expected numbers, found '1-'\nhint: write 0-3 or 0,2,5-7"),
        (("--stages", "3-1"), "--stages: expected numbers, found '3-1'\nhint: write 0-3 or 0,2,5-7"),
        (("--stages", "0,3-1"), "--stages: expected numbers, found '0,3-1'\nhint: write 0-3 or 0,2,5-7"),
        (
            ("--stages", "1", "--virtual"),
            "--stages: says which bundles are packed, --virtual that none is\nhint: leave one of the two out",
        ),
    ],
)
def test_stages_that_make_no_sense_are_a_usage_error(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config())
    asked = ("pack", tmp_path / "source", "--layout", "pp=4", "--out", tmp_path / "out", *flags)
    assert refusal(*asked) == (2, f"error: {message}\n")
    assert leftovers(tmp_path / "out") == []


def test_only_a_manifest_may_be_packed_without_a_layout(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config())
    code, said = refusal("pack", tmp_path / "source", "--out", tmp_path / "out")
    assert (code, said.splitlines()[-1]) == (2, "Error: Missing option '--layout'.")
