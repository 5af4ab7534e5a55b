"""Loading on a rank of a job: what is missing, and when that is known."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from manifests.errors import ShardError, UnreachableError
from manifests.schema import WEIGHTS
from manifests.store import open_shard
from runner.bundle.cache_folder import CacheFolder
from runner.bundle.packed import Packed, open_packed
from runner.distributed.watchdog import StallTimer
from runner.distributed.world import World
from runner.load.deferred import DeferredVerification
from runner.load.load import Reading
from runner.load.local_cache import LocalCache
from runner.load.stored import StageLoader
from runner.tensors.local_shard import Piece, whole_pieces
from stores import bundles
from tests.builders import EMBEDDING, llama_config, pack, weights_path, write_model
from tests.fast.trained import write_trained

pytestmark = pytest.mark.usefixtures("one_rank")


def loader_of(origin: Packed, *, is_broadcast: bool) -> tuple[StageLoader, tuple[Piece, ...]]:
    pieces = whole_pieces({fqn: torch.empty(shape) for fqn, shape in origin.shape.tensors.items()})
    loader = StageLoader(
        origin=origin, cache=None, group=dist.group.WORLD, is_broadcast=is_broadcast, device=torch.device("cpu"),
        how=Reading(), deferred=DeferredVerification(is_needed=False),
    )  # fmt: skip
    return loader, tuple(pieces)


@pytest.mark.parametrize("is_broadcast", [False, True])
def test_headers_are_read_once(is_broadcast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, pieces = loader_of(open_packed(write_trained(tmp_path, "pp=2")), is_broadcast=is_broadcast)
    opened = []

    def count(*args: Any, **options: Any) -> Any:
        opened.append(args)
        return open_shard(*args, **options)

    monkeypatch.setattr(bundles, "open_shard", count)
    with loader.reading(pieces) as pending:
        pass
    assert loader.load(pieces, WEIGHTS, pending).num_tensors == len(loader.origin.shape.tensors)
    assert len(opened) == 2  # a shard on each stage


@pytest.mark.parametrize("is_broadcast", [False, True])
def test_missing_shard_is_named_before_what_runs_beside_reading(is_broadcast: bool, tmp_path: Path) -> None:
    origin = open_packed(write_trained(tmp_path, "pp=2"))
    (origin.root / weights_path(1, 2)).unlink()
    loader, pieces = loader_of(origin, is_broadcast=is_broadcast)
    reached = []
    with pytest.raises(ShardError) as caught, loader.reading(pieces):
        reached.append("the self-check")
    assert (caught.value.code, reached) == ("shard.missing", [])


def test_seconds_of_a_load_have_those_in_which_parts_are_verified(tmp_path: Path) -> None:
    write_model(tmp_path / "model", llama_config(vocab_size=1 << 20))
    loader, _ = loader_of(open_packed(pack(tmp_path / "model", tmp_path / "out")), is_broadcast=False)
    row = Piece(fqn=EMBEDDING, shape=(1 << 20, 16), offset=(0, 0), memory=torch.empty(1, 16))
    with loader.reading((row,)) as pending:
        assert pending is not None
    started_s = time.perf_counter()
    report = loader.load((row,), WEIGHTS, pending)
    taken_s = time.perf_counter() - started_s
    assert report.verified_nbytes > 1 << 24
    assert report.load_s > taken_s / 2


@pytest.mark.parametrize("is_broadcast", [False, True])
def test_timer_measures_nothing_after_a_load(is_broadcast: bool, tmp_path: Path) -> None:
    """The watchdog of the run has it: weights that were read long ago are not a disk that does not answer."""
    loader, pieces = loader_of(open_packed(write_trained(tmp_path, "pp=2")), is_broadcast=is_broadcast)
    loader.load(pieces, WEIGHTS)
    assert loader.how.timer.stalled_s == 0.0


def hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let reads of tensors, which threads read, and of a file that is copied wait until the event is set."""
    preadv, answered = os.preadv, threading.Event()

    def wait(*args: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            answered.wait(20)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", wait)
    return answered


def cache_of(origin: Packed, path: Path) -> LocalCache:
    modules = {module for stage in origin.manifest.stages for module in stage.modules}
    folder = CacheFolder(path=path, limit_s=0.1)
    return LocalCache(origin.bundles, folder, modules, (WEIGHTS,), World(rank=0, local_rank=0, size=1))


def test_disk_that_does_not_answer_while_shards_are_cached_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(open_packed(write_trained(tmp_path, "pp=2")), tmp_path / "node")
    answered = hang(monkeypatch)
    with pytest.raises(UnreachableError) as caught:
        cache.ensure()
    assert (caught.value.code, caught.value.where) == ("store.stalled", "rank 0: stage to local")
    answered.set()


def test_cached_shard_whose_disk_does_not_answer_is_not_read_again_to_repair_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, pieces = loader_of(open_packed(write_trained(tmp_path, "pp=2")), is_broadcast=False)
    cache = cache_of(loader.origin, tmp_path / "node")
    cache.ensure()
    loader = replace(loader, cache=cache, how=Reading(timer=StallTimer(0.1)))
    answered = hang(monkeypatch)
    with pytest.raises(UnreachableError) as caught:
        loader.load(pieces, WEIGHTS)
    assert (caught.value.code, caught.value.where) == ("store.stalled", "rank 0: load")
    answered.set()
