"""The door to a manifest: links to its folder are followed once, whoever asks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stores.open import open_manifest
from tests.builders import llama_config, write_model
from tests.builders import reshard as command


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("door")
    write_model(folder / "model", llama_config())
    assert command("pack", folder / "model", "--layout", "pp=2", "--out", folder / "packed").code == 0
    return folder / "packed"


def test_link_that_moves_after_a_manifest_was_read_mixes_no_two_checkpoints(packed: Path, tmp_path: Path) -> None:
    other, latest = shutil.copytree(packed, tmp_path / "other"), tmp_path / "latest"
    latest.symlink_to(packed)
    read = open_manifest(latest)
    os.replace(_link(tmp_path / "new", other), latest)
    assert (read.root, read.parent.location) == (packed, str(packed))
    assert str(read) == str(packed / "manifest.json")


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path
