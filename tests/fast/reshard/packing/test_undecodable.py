"""Names that are not valid UTF-8, which no manifest could say: refused before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import files_in, pack, refusal, reshard, write_model

ODD = os.fsdecode(b"x\xff")


def rename_model(place: Path) -> Path:
    write_model(place / ODD)
    return place / ODD


def rename_parent(place: Path) -> Path:
    write_model(place / ODD / "source")
    return place / ODD / "source"


def add_weights(place: Path) -> Path:
    write_model(place / "source")
    (place / "source" / f"{ODD}.bin").touch()  # left out, and named in the manifest
    return place / "source"


def rename_manifest(place: Path) -> Path:
    write_model(place / "source")
    pack(place / "source", place / "packed")
    (place / "packed").rename(place / ODD)
    return place / ODD


@pytest.mark.parametrize("make", [rename_model, rename_parent, add_weights, rename_manifest])
def test_source_that_a_manifest_could_not_name_is_refused(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path)
    asked = ("pack", source, "--layout", "pp=1", "--out", tmp_path / "out")
    for flags in ((), ("--virtual",), ("--part", "1/2"), ("--dry-run",)):
        refused = refusal(*asked, *flags)
        assert refused.found[:2] == (3, "store.invalid-name")
        assert ODD in refused.found[2]
    assert not any("out" in path.name for path in tmp_path.iterdir())


def test_manifest_that_was_moved_to_such_a_place_is_verified_and_exported(tmp_path: Path) -> None:
    packed = rename_manifest(tmp_path)
    assert reshard("verify", packed, "--json").json["equal"] is True
    assert reshard("export", packed, "--to", "hf", "--out", tmp_path / "exported").code == 0
    assert files_in(tmp_path / "exported") == files_in(tmp_path / "source")


@pytest.mark.parametrize("verb", ["pack", "export"])
def test_output_of_such_a_name_is_refused(verb: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    given = (tmp_path / "packed", "--to", "hf") if verb == "export" else (tmp_path / "source", "--layout", "pp=2")
    assert refusal(verb, *given, "--out", tmp_path / ODD).found == (2, "options.not-utf8", "--out")
    assert not (tmp_path / ODD).exists()


def test_layout_file_of_such_a_name_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    (tmp_path / f"{ODD}.toml").write_text('stages = [["embed_tokens", "layers.0-3", "norm", "lm_head"]]\n')
    spec = str(tmp_path / f"{ODD}.toml")
    refused = refusal("pack", tmp_path / "source", "--layout", spec, "--out", tmp_path / "out")
    assert refused.found[::2] == (3, "layout")
