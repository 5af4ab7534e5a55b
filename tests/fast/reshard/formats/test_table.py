"""A new format is a folder and a row of the table: `plan`, `check`, `inspect`, `pack` and `export` then have it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from reshard.formats import table
from reshard.formats.open import find_format
from reshard.formats.table import ExportTarget, Format
from tests.builders import llama_config, llama_shapes, random_tensors, refusal, reshard, run, write_model

CONFIG = llama_config()
NPY = "tests.fast.reshard.formats.npy_folder"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_model(tmp_path / "source", CONFIG, random_tensors(CONFIG, dtypes=("F32",)))
    run("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    npy = Format(
        name="npy",
        is_in=lambda names: any(name.endswith(".npy") for name in names),
        read=f"{NPY}.read",
        write=f"{NPY}.write",
        listing=f"{NPY}.read",
        targets=(ExportTarget(to="npy", reader="NumPy: {out}"),),
    )
    monkeypatch.setattr(table, "FORMATS", (*table.FORMATS, npy))
    for name in ("reshard.cli.pack", "reshard.cli.command"):  # the choices of --to are made on import
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("row")
def test_every_verb_has_a_format_of_the_table(packed: Path, tmp_path: Path) -> None:
    exported, again = tmp_path / "exported", tmp_path / "again"
    assert f"for NumPy: {exported}" in run("export", packed, "--to", "npy", "--out", exported).out
    shapes = {path.stem: np.load(path).shape for path in exported.glob("*.npy")}
    assert shapes == llama_shapes(CONFIG)
    planned = run("plan", exported, "--layout", "pp=4", "--json").json
    assert sum(stage["nbytes"] for stage in planned["stages"]) == sum(4 * np.prod(dims) for dims in shapes.values())
    checked = run("check", exported, "--values", "--against", packed, "--bytes", "--json").json
    assert (checked["kind"], checked["num_tensors"], checked["problems"]) == ("npy", len(shapes), [])
    listed = run("inspect", exported, "--tensors", "--json").json
    assert (listed["format"], {item["name"] for item in listed["tensors"]}) == ("npy", set(shapes))
    run("pack", exported, "--layout", "pp=2", "--out", again)
    run("verify", again, "--against", tmp_path / "source")
    (exported / "model.norm.weight.npy").unlink()
    refused = reshard("check", exported, "--json").json["problems"]
    assert [finding["code"] for finding in refused] == ["source.missing-tensor"]


def test_without_the_row_it_is_no_format(packed: Path, tmp_path: Path) -> None:
    assert reshard("export", packed, "--to", "npy", "--out", tmp_path / "exported").code == 2
    assert not (tmp_path / "exported").exists()


def test_bare_config_and_a_manifest_that_is_missing_are_refused_by_what_they_lack(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    ended = reshard("plan", tmp_path / "model" / "config.json")
    assert (ended.code, "Missing option '--layout'" in ended.err) == (2, True)
    missing = tmp_path / "none" / "manifest.json"
    assert refusal("check", missing).found[:2] == (3, "manifest.no-such-folder")


def test_torch_shards_beside_a_stray_metadata_file_are_a_hugging_face_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model" / ".metadata").write_bytes(b"x")
    assert find_format(str(tmp_path / "model"))[0].name == "huggingface"
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    assert find_format(str(tmp_path / "model"))[0].name == "huggingface"
