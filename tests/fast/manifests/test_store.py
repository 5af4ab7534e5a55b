"""Files of a checkpoint folder: read with checks, written whole."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from manifests.digest import digest_bytes
from manifests.errors import InputError
from manifests.safetensors import header_template, layout_tensors
from manifests.schema import Shard
from manifests.store import open_shard, read_manifest, read_small_file, write_file, write_manifest
from tests.fast.manifests.drawn_manifests import full_manifest

ROOT = Path(__file__).parents[3]
ENTRIES = layout_tensors([("a", "F32", (2, 3))])
HEAD = header_template(ENTRIES, {})
DAMAGED = "hint: it was changed or removed after it was written: copy the checkpoint again, or write it again"


def write_shard(folder: Path) -> Shard:
    (folder / "a.safetensors").write_bytes(HEAD + bytes(24))
    return Shard(path="a.safetensors", nbytes=len(HEAD) + 24, digest=digest_bytes(HEAD))


def test_manifest_is_read_by_its_file_and_by_its_folder(tmp_path: Path) -> None:
    write_manifest(tmp_path, full_manifest())
    assert read_manifest(tmp_path) == full_manifest()
    assert read_manifest(tmp_path / "manifest.json") == full_manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_manifest_that_breaks_an_invariant_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        write_manifest(tmp_path, replace(full_manifest(), stages=()))
    assert str(error.value).startswith("manifest.json: 3 problems:\n  layout.num_stages: expected 0 (stages), found 4")
    assert list(tmp_path.iterdir()) == []


def test_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_manifest(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: no manifest.json here\n"
        "hint: a folder without one was never finished; make one with reshard pack SOURCE --layout SPEC --out DIR"
    )


def test_place_without_a_manifest_is_told_apart(tmp_path: Path) -> None:
    for name in ("step-000009", "step-000010", "step-1000000"):
        (tmp_path / "run" / name).mkdir(parents=True)
        write_manifest(tmp_path / "run" / name, full_manifest())
    (tmp_path / "run" / "step-2000000").mkdir()  # was never finished
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for place, problem in (
        ("nothere", "no such file or folder\nhint: name a folder that reshard pack has written"),
        ("nothere/manifest.json", "no such file or folder\nhint: name a folder that reshard pack has written"),
        ("model", f"no manifest.json here\nhint: pack it first: reshard pack {tmp_path}/model --layout SPEC --out DIR"),
        ("run", f"no manifest.json here\nhint: there is one in {tmp_path}/run/step-1000000"),
    ):
        with pytest.raises(InputError) as error:
            read_manifest(tmp_path / place)
        assert str(error.value) == f"{tmp_path}/{place}: {problem}"


def test_refusals_of_a_manifest_name_its_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError) as error:
        read_manifest(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/manifest.json: format: expected 'reshard-manifest'\nhint: this file was not written by reshard"
    )


def test_shard_that_is_as_the_manifest_says_is_opened(tmp_path: Path) -> None:
    assert open_shard(tmp_path, write_shard(tmp_path)).tensors == ENTRIES


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        open_shard(tmp_path, replace(write_shard(tmp_path), path="b.safetensors"))
    assert str(error.value) == f"{tmp_path}/b.safetensors: the manifest names this shard, and it is missing\n{DAMAGED}"


def test_shard_of_another_size_is_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path)
    with open(tmp_path / shard.path, "r+b") as file:
        file.truncate(4100)
    with pytest.raises(InputError) as error:
        open_shard(tmp_path, shard)
    assert str(error.value) == f"{tmp_path}/a.safetensors: expected 4120 bytes (manifest.json), found 4100\n{DAMAGED}"


def test_shard_with_another_header_is_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path)
    spoiled = HEAD.replace(b"00000", b"00001", 1)
    (tmp_path / shard.path).write_bytes(spoiled + bytes(24))
    with pytest.raises(InputError) as error:
        open_shard(tmp_path, shard)
    assert str(error.value) == (
        f"{tmp_path}/a.safetensors: header: expected {shard.digest} (manifest.json), found {digest_bytes(spoiled)}"
    )


def test_small_file_is_checked_against_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    assert read_small_file(path, digest_bytes(b"{}")) == b"{}"
    with pytest.raises(InputError) as error:
        read_small_file(path, digest_bytes(b"[]"))
    assert str(error.value) == (
        f"{path}: expected {digest_bytes(b'[]')}, found {digest_bytes(b'{}')}\n"
        "hint: the file was changed or damaged after it was written"
    )


def test_small_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_small_file(tmp_path / "config.json")
    assert str(error.value) == (
        f"{tmp_path}/config.json: cannot be read: No such file or directory\nhint: check the path for typos"
    )
    with pytest.raises(InputError, match=r"\nhint: the manifest names it: copy it there again$"):
        read_small_file(tmp_path / "config.json", digest_bytes(b"{}"))


def test_small_file_of_more_than_a_gibibyte_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "notes.bin"
    path.touch()
    os.truncate(path, (1 << 30) + 1)  # sparse
    with pytest.raises(InputError) as error:
        read_small_file(path)
    assert str(error.value) == f"{path}: expected at most 1073741824 bytes"


def test_written_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    code = (
        "import resource, signal, sys; from pathlib import Path; from manifests.store import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "write_file(Path(sys.argv[1]), bytes(8192))"
    )
    ended = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "OSError: [Errno 27] File too large" in ended.stderr
    assert path.read_bytes() == b"old"
