"""reshard reads the hub as it reads a folder, by ranges alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import files_in, llama_config, reshard, write_model
from tests.servers.hub import serve_hub, set_up


def test_pack_from_the_hub_is_the_pack_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True), num_shards=3)
    here = ("--layout", "pp=2", "--out", tmp_path / "here")
    assert reshard("pack", tmp_path / "source", *here).code == 0
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        commit = hub.push("org/tiny", files_in(tmp_path / "source"))
        ended = reshard("pack", "hf://org/tiny", "--layout", "pp=2", "--out", tmp_path / "there")
    assert ended.code == 0, ended.err
    here_files, there_files = files_in(tmp_path / "here"), files_in(tmp_path / "there")
    manifest = there_files.pop("manifest.json").decode()
    assert here_files.pop("manifest.json")
    assert there_files == here_files
    assert str(commit) in manifest
    assert reshard("export", tmp_path / "there", "--to", "hf", "--out", tmp_path / "back").code == 0
    assert files_in(tmp_path / "back") == files_in(tmp_path / "source")


def test_manifest_on_the_hub_keeps_its_layout_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "source")
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "packed").code == 0
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        hub.push("org/packed", files_in(tmp_path / "packed"))
        hub.push("org/model", files_in(tmp_path / "source"))
        for number, name in enumerate(("hf://org/packed", "org/packed", "org/packed@main")):
            ended = reshard("pack", name, "--out", tmp_path / f"out-{number}")
            assert ended.code == 0, ended.err
            assert reshard("verify", tmp_path / f"out-{number}", "--against", tmp_path / "packed").code == 0
        for name in ("hf://org/model", "org/model"):
            assert reshard("pack", name, "--out", tmp_path / "refused").err.endswith("Missing option '--layout'.\n")
