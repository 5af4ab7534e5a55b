"""The door to a manifest: links to its folder are followed once, whoever asks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import reshard
from manifests.errors import ManifestError
from runner.bundle.packed import open_packed
from stores.open import open_manifest
from tests.builders import llama_config, write_model
from tests.builders import reshard as command


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("door")
    write_model(folder / "model", llama_config())
    assert command("pack", folder / "model", "--layout", "pp=2", "--out", folder / "packed").code == 0
    return folder / "packed"


def test_linked_manifest_is_in_the_folder_of_its_target(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "manifest.json").symlink_to(packed / "manifest.json")
    for address in (tmp_path / "linked", tmp_path / "linked" / "manifest.json"):
        assert open_manifest(address).root == open_packed(address).root == packed
        assert reshard.open(address).stage(0)
        assert command("verify", address).code == 0


def test_link_that_moves_after_a_manifest_was_read_mixes_no_two_checkpoints(packed: Path, tmp_path: Path) -> None:
    other, latest = shutil.copytree(packed, tmp_path / "other"), tmp_path / "latest"
    latest.symlink_to(packed)
    read = open_manifest(latest)
    os.replace(_link(tmp_path / "new", other), latest)
    assert (read.root, read.parent.location) == (packed, str(packed))
    assert str(read) == str(packed / "manifest.json")


def test_path_without_links_stays_as_it_was_given(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(packed.parent)
    assert str(open_manifest("packed")) == "packed/manifest.json"
    with pytest.raises(ManifestError) as error:
        open_manifest("packer")
    assert (error.value.where, error.value.code) == ("packer", "manifest.no-such-folder")


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path
