"""reshard reads the hub as it reads a folder, by ranges alone."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from manifests.safetensors import read_header
from tests.builders import files_in, llama_config, pack, reshard, run, write_model
from tests.servers.hub import AGENTS, Hub, Request, serve_hub, set_up


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


def test_a_pack_asks_for_each_file_once_and_each_header_in_one_request(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if agents := sys.modules.get("huggingface_hub.utils._detect_agent"):
        monkeypatch.setattr(agents, "_registry", None)  # as in a new process
    write_model(tmp_path / "source", num_shards=3)
    files = files_in(tmp_path / "source")
    commit = hub.push("org/tiny", files)
    pack("hf://org/tiny", tmp_path / "out")

    def kind(request: Request) -> str:
        return "data" if request.status == 206 else "answer" if request.status == 200 else "redirect"

    listing, *requests = hub.requests
    assert listing.path == "/api/models/org/tiny?blobs=true"
    assert AGENTS not in [request.path for request in requests]
    resolved = [request.path for request in requests if "/resolve/" in request.path]
    assert sorted(resolved) == [f"/org/tiny/resolve/{commit}/{name}" for name in sorted(files)]
    # With a HEAD for each file, two requests for each header and config.json read twice, there were 29 of them.
    assert Counter(map(kind, requests)) == {"redirect": 7, "answer": 7, "data": 6}
    assert len(hub.requests) == 21
    shards = [tmp_path / "source" / name for name in files if name.endswith(".safetensors")]
    data_nbytes = sum(path.stat().st_size - read_header(path).nbytes for path in shards)
    assert sum(request.nbytes for request in requests if request.status == 206) == data_nbytes


def test_manifest_on_the_hub_keeps_its_layout_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        hub.push("org/packed", files_in(tmp_path / "packed"))
        hub.push("org/model", files_in(tmp_path / "source"))
        for number, name in enumerate(("hf://org/packed", "org/packed", "org/packed@main")):
            run("pack", name, "--out", tmp_path / f"out-{number}")
            assert reshard("verify", tmp_path / f"out-{number}", "--against", tmp_path / "packed").code == 0
        for name in ("hf://org/model", "org/model"):
            assert reshard("pack", name, "--out", tmp_path / "refused").err.endswith("Missing option '--layout'.\n")
