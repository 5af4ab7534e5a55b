"""`runner launch --stage-to-local`: real ranks that read copies of their bundles on a disk of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from manifests.digest import digest_bytes
from manifests.store import read_manifest
from runner.bundle.cache_folder import CacheFolder, node_folder
from stores.local import LocalFolder
from tests.builders import reshard
from tests.fast.runner.tiny import save_model
from tests.process.buckets import url_of
from tests.process.torchrun import ROOT
from tests.servers.s3 import MotoServer

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

TRAINING = ("--data", "synthetic", "--seq-len", "16", "--global-batch", "8", "--steps", "2", "--device", "cpu")


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "tied", tie_word_embeddings=True)
    assert reshard("pack", folder / "tied", "--layout", "pp=2", "--out", folder / "pp2").code == 0
    return folder / "pp2"


def launch(packed: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "runner.cli", "launch", str(packed), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def lines_of(log: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Give what is said of each rank's start, and the loss of each step."""
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "load_nbytes" in line], [line["loss"] for line in lines if "loss" in line]


def copies_of(packed: Path, scratch: Path) -> Path:
    return node_folder(scratch, packed.name, digest_bytes((packed / "manifest.json").read_bytes()))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_ranks_that_read_rows_share_one_copy_and_never_a_damaged_one(packed: Path, tmp_path: Path) -> None:
    scratch, losses = tmp_path / "scratch", []
    nbytes = sum(shard.nbytes for shard in read_manifest(packed).shards)
    for name, staged in (
        ("first", nbytes),
        ("again", 0),
        ("damaged", read_manifest(packed).stages[1].shards[0].nbytes),
    ):
        if name == "damaged":  # no digest proves the rows that a rank reads
            flip(copies_of(packed, scratch) / SECOND)
        flags = ("--nproc-per-node", 4, "--stage-to-local", scratch, "--log-dir", tmp_path / name)
        done = launch(packed, *flags, "--", *TRAINING, "--dp-shard", 2)
        assert done.returncode == 0, done.stderr
        ranks, found = lines_of(tmp_path / name)
        assert sum(rank["staged_nbytes"] for rank in ranks) == staged
        assert sum(rank["staged_nbytes"] + rank["reused_nbytes"] for rank in ranks) == nbytes
        assert min(rank["staged_s"] for rank in ranks) > 0
        losses.append(found)
    assert "1 damaged shards were copied again" in done.stderr
    assert losses[0] == losses[1] == losses[2]
    assert {path.relative_to(scratch).as_posix() for path in scratch.rglob("*") if path.is_file()} == {
        f"{copies_of(packed, scratch).name}/{shard.path}" for shard in read_manifest(packed).shards
    }


def test_damage_that_the_loader_finds_is_mended_once(packed: Path, tmp_path: Path) -> None:
    folder = CacheFolder(path=copies_of(packed, tmp_path / "scratch"), limit_s=10)
    for shard in read_manifest(packed).shards:
        folder.ensure(LocalFolder(packed).file(shard.path), shard, threading.Event())
    flip(folder.path / FIRST)
    done = launch(packed, "--stage-to-local", tmp_path / "scratch", "--log-dir", tmp_path, "--", *TRAINING)
    assert done.returncode == 0, done.stderr
    assert "1 damaged shards were copied again" in done.stderr
    for path in (FIRST, SECOND):
        assert (folder.path / path).read_bytes() == (packed / path).read_bytes()


def test_damaged_bundle_is_refused_by_name_and_not_copied(packed: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    subprocess.run(["cp", "-r", packed, bad], check=True)
    flip(bad / SECOND)
    done = launch(bad, "--stage-to-local", tmp_path / "scratch", "--log-dir", tmp_path, "--", *TRAINING)
    assert (done.returncode, done.stdout) == (3, "")
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert f"{bad}/{SECOND}: 'model.norm.weight': " in message
    assert not list((tmp_path / "scratch").rglob(SECOND))


def test_node_without_room_is_refused_before_anything_is_copied(packed: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("NOT RUN: only root mounts a small disk")
    try:
        done = launch(packed, "--stage-to-local", small, "--log-dir", tmp_path, "--", *TRAINING)
        assert (done.returncode, done.stdout) == (3, "")
        needed = sum(shard.nbytes for shard in read_manifest(packed).shards)
        (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert f": --stage-to-local {small}: 3 shards need {needed} more bytes " in message
        assert not [path for path in small.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.slow
def test_manifest_in_a_bucket_is_trained_from_copies(packed: Path, moto: MotoServer, tmp_path: Path) -> None:
    assert reshard("pack", packed, "--layout", "pp=2", "--out", url_of("pp2")).code == 0
    scratch = tmp_path / "scratch"
    flags = ("--stage-to-local", scratch, "--log-dir", tmp_path / "log")
    done = launch(url_of("pp2/manifest.json"), *flags, "--", *TRAINING, "--save", tmp_path / "trained")
    assert done.returncode == 0, done.stderr
    done = launch(packed, "--log-dir", tmp_path / "local", "--", *TRAINING, "--save", tmp_path / "as-local")
    assert done.returncode == 0, done.stderr
    assert lines_of(tmp_path / "log")[1] == lines_of(tmp_path / "local")[1]
    (folder,) = scratch.iterdir()
    assert folder.name.startswith("pp2-")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    carried = {file.path for file in read_manifest(packed).files}
    assert names == {"manifest.json", *carried, *(shard.path for shard in read_manifest(packed).shards)}
    trained = read_manifest(tmp_path / "trained")
    assert trained.parents[-1].location == url_of("pp2")
    assert trained.files == read_manifest(tmp_path / "as-local").files
