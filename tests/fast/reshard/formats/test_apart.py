"""No output takes away what it is made of, whatever either is called."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.builders import files_in, llama_config, pack, random_tensors, refusal, reshard, write_model

OVERLAPS = "output.overlaps-source"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with a model, a link to it, and its bundles: of its own bytes, and virtual ones."""
    write_model(tmp_path / "source", num_shards=2)
    (tmp_path / "link").symlink_to("source")
    for name, flags in (("packed", ()), ("virtual", ("--virtual",))):
        pack(tmp_path / "source", tmp_path / name, "pp=2", *flags)
    return tmp_path


def everything(place: Path) -> dict[str, bytes]:
    return {name: data for folder in ("source", "packed", "virtual") for name, data in files_in(place / folder).items()}


def spellings(folder: Path) -> tuple[str, ...]:
    here = os.path.relpath(folder)
    return (str(folder), f"{folder.parent}/gone/../{folder.name}/", here, f"file://{folder}", f"file://{folder}/.")


@pytest.mark.parametrize("name", ["packed", "virtual"])
def test_export_replaces_neither_the_model_nor_the_bundles_by_any_name(name: str, place: Path) -> None:
    before = everything(place)
    for folder in (place / "source", place / "link", place / name):
        for out in spellings(folder):
            refused = refusal("export", place / name, "--to", "hf", "--out", out, "--force")
            assert refused.found[:2] == (3, OVERLAPS), out
            assert os.path.realpath(refused.found[2].removeprefix("file://")) == os.path.realpath(folder)
    assert everything(place) == before


@pytest.mark.parametrize("name", ["packed", "virtual"])
def test_export_removes_no_folder_that_holds_the_model_or_lies_in_it(name: str, place: Path) -> None:
    write_model(place / "source" / "original")  # as gpt-oss has it
    for path, data in files_in(place / "source").items():
        if "/" not in path:
            (place / path).write_bytes(data)  # which makes a model of the folder around it
    before = everything(place)
    for out in (place, place / "source" / "original"):
        for address in (str(out), f"file://{out}"):
            refused = refusal("export", place / name, "--to", "hf", "--out", address, "--force")
            assert refused.found in ((2, OVERLAPS, "--out"), (3, OVERLAPS, address))
    assert everything(place) == before


def test_export_removes_no_file_that_a_link_of_the_source_leads_to(tmp_path: Path) -> None:
    write_model(tmp_path / "elsewhere")
    (tmp_path / "source").mkdir()
    for name in files_in(tmp_path / "elsewhere"):
        (tmp_path / "source" / name).symlink_to(tmp_path / "elsewhere" / name)
    pack(tmp_path / "source", tmp_path / "packed", "pp=2", "--virtual")
    before, out = files_in(tmp_path / "elsewhere"), tmp_path / "elsewhere"
    refused = refusal("export", tmp_path / "packed", "--to", "hf", "--out", out, "--force")
    assert refused.found == (2, OVERLAPS, "--out")
    assert files_in(out) == before


def test_model_that_is_gone_comes_back_where_it_was(place: Path) -> None:
    before = files_in(place / "source")
    for path in (place / "source").iterdir():
        path.unlink()
    assert reshard("export", place / "packed", "--to", "hf", "--out", place / "source").code == 0
    assert files_in(place / "source") == before


@pytest.mark.parametrize("named", ["packed", "packed/manifest.json", "virtual"])
@pytest.mark.parametrize("verb", ["pack", "export"])
def test_output_inside_a_manifests_folder_is_refused(verb: str, named: str, place: Path) -> None:
    source = place / named.partition("/")[0]
    flags = ("--layout", "pp=1") if verb == "pack" else ("--to", "hf")
    for out in (f"{source}/inside", f"{place}/packed/../{source.name}/a/b", f"file://{source}/inside"):
        assert refusal(verb, place / named, *flags, "--out", out).found == (2, OVERLAPS, "--out")
    assert not (source / "inside").exists()


def test_source_inside_the_output_is_not_removed_with_it(place: Path) -> None:
    inside = place / "packed" / "step-100"
    pack(place / "source", inside)
    write_model(place / "packed" / "model")
    before = files_in(place / "packed")
    for source in (inside, inside / "manifest.json", place / "packed" / "model"):
        for out in (str(place / "packed"), f"file://{place}/packed"):
            refused = refusal("pack", source, "--layout", "pp=1", "--out", out, "--force")
            assert refused.found == (2, OVERLAPS, "--out")
    assert files_in(place / "packed") == before


@pytest.mark.parametrize("out", ["packed", "packed/../packed", "file://PLACE/packed"])
def test_conversion_does_not_replace_the_bytes_that_it_converts(out: str, tmp_path: Path) -> None:
    config = llama_config()
    write_model(tmp_path / "source", config, random_tensors(config, dtypes=["F32"]))
    pack(tmp_path / "source", tmp_path / "packed")
    before = files_in(tmp_path / "packed")
    out = out.replace("PLACE", str(tmp_path)) if "://" in out else str(tmp_path / out)
    for source in (tmp_path / "packed", tmp_path / "packed/manifest.json"):
        assert refusal("pack", source, "--dtype", "bf16", "--out", out, "--force").found == (3, OVERLAPS, out)
    assert files_in(tmp_path / "packed") == before
    if "://" in out:  # nothing finished in a bucket is replaced
        assert refusal("pack", tmp_path / "packed", "--out", out, "--force").found[1] == "output.exists"
        return
    pack(tmp_path / "packed", out, "pp=1", "--force")
    assert json.loads((tmp_path / "packed/manifest.json").read_text())["layout"]["num_stages"] == 1
    assert reshard("verify", tmp_path / "packed", "--against", tmp_path / "source").code == 0
