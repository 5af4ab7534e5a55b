"""Pipes, sockets and links where files are expected: refused or named, and never waited for."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import files_in, pack, reshard, run, write_model

pytestmark = pytest.mark.timeout(60)

SHARD = "model-00002-of-00002.safetensors"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path may have 108 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


MAKERS = (os.mkfifo, make_socket)
by_kind = pytest.mark.parametrize("make", MAKERS, ids=["pipe", "socket"])


@by_kind
@pytest.mark.parametrize("name", ["manifest.json", "config.json", "source.json", "tokenizer.json", SHARD])
def test_manifest_folder_with_something_else_in_place_of_a_file_is_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    write_model(tmp_path / "source")
    packed = tmp_path / "packed"
    pack(tmp_path / "source", packed)
    (packed / name).unlink()
    make(packed / name)
    out = tmp_path / "out"
    for command in (
        ("verify", packed), ("inspect", packed), ("pack", packed, "--layout", "pp=1", "--out", out),
        ("export", packed, "--to", "hf", "--out", out),
    ):  # fmt: skip
        ended = reshard(*command, "--json")
        if command[0] == "inspect" and ended.code == 0:  # it reads the manifest alone
            assert name != "manifest.json"
            continue
        assert ended.code in (3, 4), (command, ended)
        assert name in ended.out
    assert not out.exists()


@by_kind
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "extra"])
def test_source_with_something_else_in_place_of_a_file_is_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_model(source)
    (source / name).unlink(missing_ok=True)
    make(source / name)
    ended = reshard("pack", source, "--layout", "pp=2", "--out", out, "--json")
    error = json.loads(ended.out)["error"]
    assert (ended.code, error["code"], error["where"]) == (3, "store.not-a-file", str(source / name))
    assert not out.exists()


def test_device_in_place_of_a_shard_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    (tmp_path / "source/model.safetensors").unlink()
    (tmp_path / "source/model.safetensors").symlink_to("/dev/zero")
    ended = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", "--json")
    assert (ended.code, json.loads(ended.out)["error"]["code"]) == (3, "store.not-a-file")


@pytest.mark.parametrize("verb", ["plan", "pack", "dry run"])
def test_files_that_links_take_out_of_a_source_are_named(verb: str, tmp_path: Path) -> None:
    source, base = tmp_path / "source", tmp_path / "base"
    write_model(base, num_shards=2)
    source.mkdir()
    for name in files_in(base):
        (source / name).symlink_to(base / name)
    (source / "tokenizer.json").unlink()
    (source / "own").mkdir()
    (source / "own/tokenizer.json").write_text("{}")
    (source / "tokenizer.json").symlink_to("own/tokenizer.json")
    more = {"plan": (), "pack": ("--out", tmp_path / "out"), "dry run": ("--out", tmp_path / "out", "--dry-run")}[verb]
    packed = run("plan" if verb == "plan" else "pack", source, "--layout", "pp=2", *more)
    named = {line.split(": ", 1)[1].split(" -> ")[0] for line in packed.err.splitlines() if " -> " in line}
    assert named == files_in(base).keys() - {"tokenizer.json", "model.safetensors.index.json"}
    assert packed.out.startswith("packed " if verb == "pack" else "LlamaForCausalLM")
