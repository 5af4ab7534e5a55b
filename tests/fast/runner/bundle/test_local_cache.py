"""The local cache: what is copied, and that partial, damaged or foreign files are never used."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from manifests.command.sizes import show_bytes
from manifests.digest import digest_bytes
from manifests.errors import InputError, ShardError, UnreachableError, UserError
from manifests.schema import MOMENTS, WEIGHTS, Manifest, Shard
from runner.bundle.cache_folder import CacheFolder, check_cacheable, node_folder, shards_of
from runner.bundle.packed import fetch, opened
from runner.distributed.watchdog import StallTimer
from runner.rundir.exit_report import code_of
from stores.local import LocalFolder
from stores.open import open_manifest
from tests.builders import files_in, flip, llama_config, pack, weights_path, write_model
from tests.fast.trained import write_trained
from tests.servers.hub import serve_hub, set_up


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four stages, with optimizer state."""
    folder = tmp_path_factory.mktemp("copies")
    first = write_trained(folder, "pp=2", tie_word_embeddings=False)
    return pack(first, folder / "pp4", "pp=4")


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return CacheFolder(path=tmp_path / "scratch" / "pp4-0123456789abcdef", limit_s=0.5)


def shard_of(trained: Path) -> Shard:
    return next(open_manifest(trained).manifest.shards)


def ensure(folder: CacheFolder, trained: Path, shard: Shard) -> bool:
    return folder.ensure(LocalFolder(trained).file(shard.path), shard)


def names_in(folder: CacheFolder) -> list[str]:
    return sorted(path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*") if path.is_file())


def test_shards_are_those_of_the_modules_and_kinds_that_are_asked_for(trained: Path) -> None:
    manifest = open_manifest(trained).manifest
    modules = {*manifest.stages[1].modules, manifest.stages[3].modules[0]}
    weights = shards_of(manifest, modules, (WEIGHTS,))
    assert [shard.path for shard in weights] == [weights_path(stage, 4) for stage in (1, 3)]
    everything = shards_of(manifest, modules, (WEIGHTS, *MOMENTS))
    assert {shard.holds for shard in everything} == {WEIGHTS, *MOMENTS}
    moments = {shard.path.partition("/")[0] for shard in everything if shard.holds != WEIGHTS}
    assert moments == {"stage-001", "stage-003"}


def test_copy_is_the_shard_and_is_made_once(trained: Path, folder: CacheFolder) -> None:
    shard = shard_of(trained)
    assert not folder.has(shard)
    assert ensure(folder, trained, shard)
    assert (folder.path / shard.path).read_bytes() == (trained / shard.path).read_bytes()
    assert folder.has(shard)
    assert not ensure(folder, trained, shard)
    assert names_in(folder) == [shard.path]


def test_partial_copy_of_a_killed_process_is_overwritten(trained: Path, folder: CacheFolder) -> None:
    shard = shard_of(trained)
    partial = (folder.path / shard.path).with_name(f".{Path(shard.path).name}.partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half" * shard.nbytes)
    assert not folder.has(shard)
    assert ensure(folder, trained, shard)
    assert names_in(folder) == [shard.path]
    assert folder.verify(shard)


@pytest.mark.parametrize("content", [b"", b"short", None], ids=["empty", "short", "another shard"])
def test_foreign_file_of_that_name_is_replaced(trained: Path, folder: CacheFolder, content: bytes | None) -> None:
    shard, *others = open_manifest(trained).manifest.shards
    path = folder.path / shard.path
    path.parent.mkdir(parents=True)
    path.write_bytes((trained / others[-1].path).read_bytes() if content is None else content)
    assert ensure(folder, trained, shard)
    assert folder.verify(shard)


def test_damaged_copy_is_found_and_removed(trained: Path, folder: CacheFolder) -> None:
    shard = shard_of(trained)
    ensure(folder, trained, shard)
    flip(folder.path / shard.path)
    assert folder.has(shard)  # size and header are right
    assert not folder.verify(shard)
    assert names_in(folder) == []
    assert ensure(folder, trained, shard)


def test_damaged_shard_is_refused_and_leaves_no_copy(trained: Path, folder: CacheFolder, tmp_path: Path) -> None:
    shard, bad = shard_of(trained), tmp_path / "bad"
    (bad / shard.path).parent.mkdir(parents=True)
    (bad / shard.path).write_bytes((trained / shard.path).read_bytes())
    flip(bad / shard.path)
    with pytest.raises(ShardError) as error:
        ensure(folder, bad, shard)
    assert error.value.code == "shard.digest-mismatch"
    assert error.value.where.startswith(f"{bad / shard.path}: '")
    assert names_in(folder) == []


def test_several_at_once_make_one_copy(trained: Path, folder: CacheFolder) -> None:
    shard, folder = shard_of(trained), replace(folder, limit_s=30)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: ensure(folder, trained, shard), range(8)))
    assert made.count(True) == 1
    assert names_in(folder) == [shard.path]
    assert folder.verify(shard)


def test_wait_for_a_copy_that_another_process_does_not_write_ends(
    trained: Path, folder: CacheFolder, wording: Callable[[str], None]
) -> None:
    shard = shard_of(trained)
    partial = (folder.path / shard.path).with_name(f".{Path(shard.path).name}.partial")
    partial.parent.mkdir(parents=True)
    holder = folder._lock(partial, lambda: None)
    with pytest.raises(UserError) as error:
        ensure(folder, trained, shard)
    assert (error.value.where, error.value.code) == (str(partial), "launch.cache-stalled")
    wording(str(error.value))
    os.close(holder)
    assert ensure(folder, trained, shard)


def test_copying_ends_soon_when_another_rank_has_failed(trained: Path, folder: CacheFolder) -> None:
    stop, shard = threading.Event(), shard_of(trained)
    stop.set()
    with pytest.raises(CancelledError):
        folder.ensure(LocalFolder(trained).file(shard.path), shard, partial(StallTimer().beat, stop))
    assert names_in(folder) == []


def test_full_disk_is_refused_before_copying(
    trained: Path, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tuple(open_manifest(trained).manifest.shards)
    old = folder.path.parent / "step-000005-00112233445566ff"
    old.mkdir(parents=True)
    (old / "x").write_bytes(b"x" * 4096)
    (folder.path.parent / "somebody's").mkdir()
    folder.check_room(shards)
    ensure(folder, trained, shards[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10_000, free=1000))
    needed = sum(shard.nbytes for shard in shards[1:])
    with pytest.raises(UserError) as error:
        folder.check_room(shards)
    assert (error.value.where, error.value.code) == (f"--stage-to-local {folder.path.parent}", "output.disk-full")
    assert f" {show_bytes(needed)} more" in error.value.problem
    assert f" {old.name} (4.00 KiB)" in error.value.hint
    folder.check_room(shards[:1])  # it is cached already


def test_file_system_that_does_not_report_its_space_is_not_taken_for_full(
    trained: Path, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tuple(open_manifest(trained).manifest.shards)
    space = dict.fromkeys(("f_blocks", "f_bfree", "f_bavail"), 0)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**space, f_frsize=4096))
    folder.check_room(shards)
    ensure(folder, trained, shards[0])
    assert folder.has(shards[0])


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 5), (errno.ESTALE, 5), (errno.ENOSPC, 3), (errno.EROFS, 3)])
def test_disk_that_fails_ends_a_job_as_a_lost_rank_does_unless_it_is_full(
    trained: Path, folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, number: int, code: int,
    wording: Callable[[str], None],
) -> None:  # fmt: skip
    def replace(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(target))

    monkeypatch.setattr(os, "replace", replace)
    shard = shard_of(trained)
    with pytest.raises(UserError) as shards:
        ensure(folder, trained, shard)
    if code == 3:
        wording(shards.value.hint)
    with pytest.raises(UserError) as small:
        fetch(open_manifest(trained), folder.path)
    codes = ("output.disk-full",) * 2 if number == errno.ENOSPC else ("store.cache-unwritable", "output.unwritable")
    assert (shards.value.code, small.value.code) == codes
    assert (code_of(shards.value), code_of(small.value)) == (code, code)
    # With an InputError, a run would skip the checkpoint for an older one.
    assert type(shards.value) is (UnreachableError if code == 5 else UserError)


def test_link_that_leads_out_of_the_folder_is_not_followed(trained: Path, folder: CacheFolder, tmp_path: Path) -> None:
    moment = next(shard for shard in open_manifest(trained).manifest.shards if shard.holds == MOMENTS[0])
    shard, elsewhere = moment, tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.path.mkdir(parents=True)
    (folder.path / "stage-000").symlink_to(elsewhere)
    with pytest.raises(UserError) as error:
        ensure(folder, trained, shard)
    assert (error.value.where, error.value.code) == (str(folder.path / "stage-000/exp_avg"), "output.link")
    (folder.path / "stage-000").unlink()
    (folder.path / "stage-000/exp_avg").mkdir(parents=True)
    (folder.path / "stage-000/exp_avg" / ".model.safetensors.partial").symlink_to(elsewhere / "precious")
    with pytest.raises(UserError) as error:
        ensure(folder, trained, shard)
    assert error.value.code == "store.cache-unwritable"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("is_read", [False, True])
def test_pipe_in_place_of_a_partial_copy_is_not_waited_for(trained: Path, folder: CacheFolder, is_read: bool) -> None:
    shard = shard_of(trained)
    partial = (folder.path / shard.path).with_name(f".{Path(shard.path).name}.partial")
    partial.parent.mkdir(parents=True)
    os.mkfifo(partial)
    reader = os.open(partial, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    # Frees a writer that waits for a reader, so that this test fails and does not hang.
    rescue = threading.Timer(20, lambda: os.close(os.open(partial, os.O_RDONLY | os.O_NONBLOCK)))
    rescue.start()
    with pytest.raises(UserError) as error:
        ensure(folder, trained, shard)
    assert (error.value.code, rescue.is_alive()) == ("store.cache-unwritable", True)
    rescue.cancel()
    if reader is not None:
        os.close(reader)


def test_folder_is_named_by_the_manifest_and_may_have_variables_of_the_node(
    monkeypatch: pytest.MonkeyPatch, wording: Callable[[str], None]
) -> None:
    digest = digest_bytes(b"a manifest")
    monkeypatch.setenv("SCRATCH_OF_JOB", "/scratch/7")
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    assert node_folder(Path("/local"), "pp4", digest) == Path(f"/local/pp4-{digest[7:23]}")
    assert node_folder(Path("$SCRATCH_OF_JOB/x"), "pp4", digest) == Path(f"/scratch/7/x/pp4-{digest[7:23]}")
    with pytest.raises(UserError) as error:
        node_folder(Path("$NOT_SET_HERE/x"), "pp4", digest)
    assert (error.value.where, error.value.code) == ("--stage-to-local $NOT_SET_HERE/x", "options.cache-variable")
    wording(str(error.value))


def test_virtual_bundles_cannot_be_cached(tmp_path: Path, wording: Callable[[str], None]) -> None:
    write_model(tmp_path / "model", llama_config())
    pack(tmp_path / "model", tmp_path / "v", "pp=2", "--virtual")
    manifest: Manifest = open_manifest(tmp_path / "v").manifest
    with pytest.raises(UserError) as error:
        check_cacheable(manifest, "v/manifest.json")
    assert (error.value.where, error.value.code) == ("--stage-to-local", "options.cache-virtual")
    wording(str(error.value))


def test_auxiliary_files_of_a_store_are_downloaded_and_verified(trained: Path, tmp_path: Path) -> None:
    found = fetch(open_manifest(trained), tmp_path / "here")
    assert (found.root, found.location) == (tmp_path / "here", str(trained))
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {"manifest.json", *(file.path for file in found.manifest.files)}
    assert found.bundles.root == LocalFolder(trained)
    shutil.copytree(trained, tmp_path / "bad")
    flip(tmp_path / "bad" / "config.json", -5)
    with pytest.raises(InputError) as error:
        fetch(open_manifest(tmp_path / "bad"), tmp_path / "there")
    assert error.value.where == f"{tmp_path}/bad/config.json"
    assert not (tmp_path / "there" / "manifest.json").exists()


def test_manifest_that_is_replaced_after_it_was_read_is_copied_as_it_was_read(trained: Path, tmp_path: Path) -> None:
    source = shutil.copytree(trained, tmp_path / "source")
    read = open_manifest(source)
    (source / "manifest.json").write_bytes(b"{}")
    assert fetch(read, tmp_path / "here").read is read
    assert (tmp_path / "here" / "manifest.json").read_bytes() == (trained / "manifest.json").read_bytes()


def test_manifest_on_the_hub_is_launched_at_the_commit_that_is_found(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        commit = hub.push("org/pp4", files_in(trained))
        with opened("hf://org/pp4", is_staged=True) as (address, launched):
            assert address == f"hf://org/pp4@{commit}"
            assert launched.location == "hf://org/pp4"
            assert launched.manifest == open_manifest(trained).manifest
        hub.push("org/pp4", {"config.json": b"{}"})
        again = fetch(open_manifest(address), tmp_path / "node")
        shard = shard_of(trained)
        folder = CacheFolder(path=tmp_path / "node", limit_s=5)
        assert folder.ensure(again.bundles.root.file(shard.path), shard)
        assert (folder.path / shard.path).read_bytes() == (trained / shard.path).read_bytes()
