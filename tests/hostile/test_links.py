"""Symbolic links: followed inside a source, never out of a checkpoint, never where something is written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from manifests.errors import InputError
from reshard.copy.journal import plan_key
from reshard.packing.plan import plan
from runner.bundle.packed import open_packed
from tests.builders import (
    edit_manifest,
    files_in,
    leftovers,
    llama_config,
    pack,
    random_tensors,
    reshard,
    write_model,
    write_safetensors,
)

CONFIG = llama_config(num_hidden_layers=2, tie_word_embeddings=True)
SHARD, REPLICAS = "model-00001-of-00002.safetensors", "stage-001/tied/model.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "source", CONFIG)
    return tmp_path / "source"


@pytest.fixture
def packed(source: Path) -> Path:
    return pack(source, source.with_name("packed"))


def into_cache(folder: Path, cache: Path) -> Path:
    """Lay a folder out as the hub's cache does: `blobs/` of files, and links to them in `snapshots/REVISION/`."""
    snapshot, blobs = cache / "snapshots" / ("0" * 40), cache / "blobs"
    blobs.mkdir(parents=True)
    for number, (name, data) in enumerate(files_in(folder).items()):
        (blobs / str(number)).write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def test_source_in_the_cache_of_the_hub_is_followed(source: Path, packed: Path, tmp_path: Path) -> None:
    snapshot, out = into_cache(source, tmp_path / "models--a--b"), tmp_path / "out"
    pack(snapshot, out)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    found, expected = files_in(out), files_in(packed)
    assert found.pop("manifest.json") != expected.pop("manifest.json")  # which names the source
    assert found == expected


def test_source_of_links_to_files_anywhere_is_followed(source: Path, packed: Path, tmp_path: Path) -> None:
    farm, out = tmp_path / "farm", tmp_path / "out"
    farm.mkdir()
    for path in source.iterdir():
        (farm / path.name).symlink_to(path)
    pack(farm, out)
    assert (out / SHARD).read_bytes() == (packed / SHARD).read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("target", ["gone", "itself", "/dev/zero", "pipe"])
def test_link_to_no_file_is_refused(name: str, target: str, source: Path, tmp_path: Path) -> None:
    (source / name).unlink()
    if target == "pipe":
        os.mkfifo(source / name)
    else:
        (source / name).symlink_to(name if target == "itself" else target)
    ended = reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "out", "--json")
    assert ended.refusal == (3, "store.not-a-file", f"{source}/{name}")
    assert leftovers(tmp_path / "out") == []


def test_checkpoint_in_the_cache_of_the_hub_is_followed(source: Path, packed: Path, tmp_path: Path) -> None:
    snapshot = into_cache(packed, tmp_path / "models--a--b-pp2")
    assert reshard("verify", snapshot).code == 0
    assert reshard("export", snapshot, "--to", "hf", "--out", tmp_path / "back").code == 0
    assert files_in(tmp_path / "back") == files_in(source)
    assert open_packed(snapshot).manifest == open_packed(packed).manifest


def test_link_that_stays_in_the_checkpoint_is_followed(packed: Path) -> None:
    (packed / "shards").mkdir()
    (packed / SHARD).rename(packed / "shards" / "first.safetensors")
    (packed / SHARD).symlink_to("shards/first.safetensors")
    assert reshard("verify", packed).code == 0


@pytest.mark.parametrize("linked", ["stage-001", SHARD, REPLICAS, "config.json", "source.json", "tokenizer.json"])
def test_link_out_of_a_checkpoint_is_refused_by_every_verb(linked: str, packed: Path, tmp_path: Path) -> None:
    """The bytes behind the link are the right ones: it is the place that is refused."""
    outside = tmp_path / "elsewhere"
    (packed / linked).rename(outside)
    (packed / linked).symlink_to(outside)
    place = f"{packed}/{REPLICAS if linked == 'stage-001' else linked}"
    for command in (
        ("plan", packed),
        ("pack", packed, "--layout", "pp=1", "--out", tmp_path / "out"),
        ("export", packed, "--to", "hf", "--out", tmp_path / "out"),
        ("verify", packed),
        ("diff", packed, packed),
        ("inspect", packed),
    ):
        assert reshard(*command, "--json").refusal == (3, "manifest.link-out-of-folder", place)
    with pytest.raises(InputError) as refused:
        open_packed(packed)
    assert (refused.value.code, refused.value.where) == ("manifest.link-out-of-folder", place)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("target", ["empty", "full", "gone"])
def test_output_that_is_a_link_is_refused(target: str, source: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(packed, tmp_path / "full")
    out, before = tmp_path / "out", files_in(tmp_path / "full")
    out.symlink_to(target)
    for flags, code in (((), "output.exists"), (("--force",), "output.not-ours")):
        for command in (("pack", source, "--layout", "pp=2"), ("export", packed, "--to", "hf")):
            ended = reshard(*command, "--out", out, *flags, "--json")
            error = ended.json["error"]
            assert (ended.code, error["code"], error["where"]) == (3, code, str(out))
    assert leftovers(out) == ["out"]
    assert out.is_symlink()
    assert files_in(tmp_path / "full") == before
    assert files_in(tmp_path / "empty") == {}


def test_work_folder_that_is_a_link_is_refused(source: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("years of work")
    (tmp_path / ".out.partial").symlink_to(victim)
    ended = reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "out")
    sentence = f"error: {tmp_path}/out: {tmp_path}/.out.partial cannot be locked: Not a directory"
    assert (ended.code, ended.err) == (3, f"{sentence} [output.cannot-lock]\n")
    assert files_in(victim) == {"thesis.tex": b"years of work"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("linked", ["stage-001", SHARD, REPLICAS, ".config.json.partial", ".journal"])
def test_link_planted_in_an_interrupted_pack_is_taken_away(
    linked: str, source: Path, packed: Path, tmp_path: Path
) -> None:
    """Somebody knows what we are about to write, and lays out our work folder with a way out of it."""
    victim, partial = tmp_path / "victim", tmp_path / ".out.partial"
    victim.mkdir()
    (victim / "model.safetensors").write_bytes(b"years of work")
    planned = plan(source, "pp=2")
    key = plan_key([shard for stage in planned.plan.stages for shard in stage.shards])
    (partial / linked).parent.mkdir(parents=True)
    names = [*files_in(packed), "stage-001/model.safetensors"]
    (partial / ".journal").write_text(json.dumps({"plan": key, "names": names}) + "\n")
    (partial / linked).unlink(missing_ok=True)
    (partial / linked).symlink_to(victim if linked == "stage-001" else victim / "model.safetensors")
    ended = reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "out")
    assert files_in(victim) == {"model.safetensors": b"years of work"}
    if linked in ("stage-001", ".journal"):  # a name that pack does not write, or nothing that says what is ours
        assert (ended.code, "[output.foreign-partial]" in ended.err) == (3, True), ended.err
        return
    assert ended.code == 0, ended.err
    assert files_in(tmp_path / "out") == files_in(packed)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_names_that_a_terminal_would_obey_are_shown_escaped(source: Path, packed: Path, tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    write_safetensors(source / "model.safetensors", {**tensors, "\x1b[2J\0\x9b": tensors["model.norm.weight"]})
    for command in (("plan", source), ("pack", source, "--out", tmp_path / "out")):
        ended = reshard(*command, "--layout", "pp=2")
        assert ended.code == 3
        assert ended.err.count("\\x1b[2J\\x00\\x9b") == 2  # in the message and in its hint
        assert not set("\x1b\0\x9b") & set(ended.err)
    assert leftovers(tmp_path / "out") == []
    edit_manifest(packed, lambda document: document.update(created_by="reshard \x1b]0;owned\x07"))
    assert "written by reshard \\x1b]0;owned\\x07\n" in reshard("inspect", packed).out
