"""Folders by their address, `file://`, and addresses of no store."""

from __future__ import annotations

from pathlib import Path

import pytest

from stores.base import read_whole
from stores.objects.store import open_objects
from tests.builders import edit_manifest, files_in, pack, reshard, run, write_model


def test_checkpoint_goes_through_an_address_of_a_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_shards=2)
    pack(tmp_path / "model", tmp_path / "here")
    url = f"file://{tmp_path}/written"
    pack(tmp_path / "model", url)
    folder = open_objects(url)
    assert {name: read_whole(folder.file(name)) for name in folder.names()} == files_in(tmp_path / "here")
    assert reshard("verify", url, "--against", tmp_path / "model").code == 0
    again = reshard("pack", url, "--layout", "pp=1", "--out", url, "--force", "--json")
    assert again.refusal == (3, "output.exists", url)
    assert reshard("verify", url, "--against", tmp_path / "model").code == 0
    run("export", url, "--to", "hf", "--out", f"{url}-back")
    folder = open_objects(f"{url}-back")
    assert {name: read_whole(folder.file(name)) for name in folder.names()} == files_in(tmp_path / "model")


@pytest.mark.parametrize("scheme", ["http", "https", "memory", "sftp", "gopher"])
def test_scheme_of_no_store_is_refused_by_every_verb(scheme: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    url, refused = f"{scheme}://host/model", (3, "store.unsupported-scheme", f"{scheme}://…")
    assert reshard("pack", url, "--layout", "pp=1", "--out", tmp_path / "out", "--json").refusal == refused
    assert reshard("check", url, "--json").refusal == refused
    assert reshard("inspect", url, "--json").refusal == refused
    assert reshard("pack", tmp_path / "model", "--layout", "pp=1", "--out", url, "--json").refusal == refused


@pytest.mark.parametrize("verb", [("inspect", "--tensors"), ("verify",), ("pack",), ("export",)])
def test_manifest_cannot_name_a_server_for_its_virtual_bundles(verb: tuple[str, ...], tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", "pp=1", "--virtual")
    edit_manifest(tmp_path / "packed", lambda document: document["virtual"].update(location="http://192.0.2.7/model"))
    out = tmp_path / "out"
    given = {"pack": ("--out", out), "export": ("--to", "hf", "--out", out)}.get(verb[0], ())
    refused = reshard(verb[0], tmp_path / "packed", *verb[1:], *given, "--json")
    assert refused.refusal == (3, "store.unsupported-scheme", "http://…")
    assert not out.exists()
