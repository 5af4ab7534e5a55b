"""`--stage-to-local`: real ranks that read copies of their bundles on a disk of their own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manifests.digest import digest_bytes
from runner.bundle.cache_folder import CacheFolder, node_folder
from stores.local import LocalFolder
from stores.open import open_manifest
from tests.builders import flip, pack
from tests.process.local_jobs import runner
from tests.process.runner.training_jobs import job, lines_of, losses_of, run_jobs, said
from tests.process.stores.objects.buckets import url_of
from tests.servers.s3 import MotoServer

TRAINING = ("--data", "synthetic", "--seq-len", "16", "--global-batch", "8", "--steps", "2", "--device", "cpu",
            "--no-self-check")  # fmt: skip

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def ranks_of(log: Path) -> list[dict[str, Any]]:
    """Give what is said of each rank's start."""
    return [line for line in lines_of(log) if "load_nbytes" in line]


def copies_of(packed: Path, scratch: Path) -> Path:
    return node_folder(scratch, packed.name, digest_bytes((packed / "manifest.json").read_bytes()))


@pytest.mark.slow
def test_ranks_that_read_rows_share_one_copy_and_never_a_damaged_one(packed: Path, tmp_path: Path) -> None:
    scratch, losses = tmp_path / "scratch", list[list[float]]()
    nbytes = sum(shard.nbytes for shard in open_manifest(packed).manifest.shards)
    for name, staged in (
        ("first", nbytes),
        ("again", 0),
        ("damaged", open_manifest(packed).manifest.stages[1].shards[0].nbytes),
    ):
        if name == "damaged":  # no digest proves the rows that a rank reads
            flip(copies_of(packed, scratch) / SECOND)
        run_jobs(4, [job(packed, tmp_path / name, *TRAINING, "--stage-to-local", scratch, "--dp-shard", 2)])
        ranks = ranks_of(tmp_path / name)
        assert sum(rank["staged_nbytes"] for rank in ranks) == staged
        assert sum(rank["staged_nbytes"] + rank["reused_nbytes"] for rank in ranks) == nbytes
        assert min(rank["staged_s"] for rank in ranks) > 0
        losses.append(losses_of(tmp_path / name))
    assert losses[0] == losses[1] == losses[2]
    cached, shards = copies_of(packed, scratch), {shard.path for shard in open_manifest(packed).manifest.shards}
    assert {path for path in scratch.rglob("*") if path.is_file()} == {cached / path for path in shards}
    assert all((cached / path).read_bytes() == (packed / path).read_bytes() for path in shards)


@pytest.fixture(scope="module")
def cached(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Jobs that find a damaged copy, a damaged original and a disk that is too small; no --small where none is."""
    place = tmp_path_factory.mktemp("cached")
    folder = CacheFolder(path=copies_of(packed, place / "scratch"), limit_s=10)
    for shard in open_manifest(packed).manifest.shards:
        folder.ensure(LocalFolder(packed).file(shard.path), shard)
    flip(folder.path / FIRST)
    bad = shutil.copytree(packed, place / "bad-original")
    flip(bad / SECOND)
    jobs = [
        job(packed, place / "damaged", *TRAINING, "--stage-to-local", place / "scratch"),
        job(bad, place / "bad", *TRAINING, "--stage-to-local", place / "bad-scratch"),
    ]
    small = place / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True)
    if not mounted.returncode:
        jobs.append(job(packed, place / "no-room", *TRAINING, "--stage-to-local", small))
    try:
        run_jobs(2, jobs)
        yield place
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", small], check=True)


def test_damage_that_the_loader_finds_is_mended_once(packed: Path, cached: Path) -> None:
    assert len(losses_of(cached / "damaged")) == 2
    assert "1 damaged shards were copied again" in said(cached / "damaged")
    for path in (FIRST, SECOND):
        assert (copies_of(packed, cached / "scratch") / path).read_bytes() == (packed / path).read_bytes()


def test_damaged_bundle_is_refused_by_name_and_not_copied(cached: Path) -> None:
    place = f"{cached}/bad-original/{SECOND}: 'model.norm.weight'"
    assert said(cached / "bad").endswith(f"error: shard.digest-mismatch at rank 1: {place}\n")
    assert not list((cached / "bad-scratch").rglob(SECOND))


def test_node_without_room_is_refused_before_anything_is_copied(cached: Path) -> None:
    if not (cached / "no-room").exists():
        pytest.skip("NOT RUN: only root mounts a small disk")
    assert said(cached / "no-room").endswith(
        f"error: output.disk-full at rank 0: --stage-to-local {cached / 'small'}\n"
    )
    assert not [path for path in (cached / "small").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_manifest_in_a_bucket_is_trained_from_copies(packed: Path, moto: MotoServer, tmp_path: Path) -> None:
    pack(packed, url_of("pp2"))
    scratch = tmp_path / "scratch"
    for manifest, log, *flags in (
        (url_of("pp2/manifest.json"), "log", "--stage-to-local", scratch),
        (packed, "local"),
    ):
        saving = ("--save", tmp_path / f"{log}-trained")
        done = runner("launch", manifest, *flags, "--log-dir", tmp_path / log, "--", *TRAINING, *saving)
        assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "log") == losses_of(tmp_path / "local")
    (folder,) = scratch.iterdir()
    assert folder.name.startswith("pp2-")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    carried = {file.path for file in open_manifest(packed).manifest.files}
    assert names == {"manifest.json", *carried, *(shard.path for shard in open_manifest(packed).manifest.shards)}
    trained = open_manifest(tmp_path / "log-trained").manifest
    assert trained.parents[-1].location == url_of("pp2")
    assert trained.files == open_manifest(tmp_path / "local-trained").manifest.files
