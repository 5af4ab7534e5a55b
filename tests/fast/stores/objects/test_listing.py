"""Prefixes with many objects: a chain has as many as it gets, any other has those of one checkpoint. Their removal."""

from __future__ import annotations

from pathlib import Path

import pytest

from stores.objects.client import open_client
from stores.objects.store import open_objects
from stores.versions import numbers_in
from tests.refusals import refused


def test_versions_of_a_chain_are_not_counted_as_objects_of_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stores.objects.store._MAX_COUNT", 2)
    for number in (1, 2, 3):
        folder = tmp_path / f"weight_v{number:06d}"
        folder.mkdir()
        for name in ("model.safetensors.index.json", "model-00001-of-00001.safetensors"):
            (folder / name).write_text("{}")
    url = f"file://{tmp_path}"
    assert numbers_in(open_objects(url)) == (1, 2, 3)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("of another")
    assert refused(lambda: open_objects(url).names()) == ("store.too-many-files", url)


def test_objects_that_are_gone_already_are_removed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    open_client(f"file://{tmp_path}").remove(["gone", "a", "gone, too", "b"])
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
