"""--digests background: what was loaded is verified by a thread, and nothing is saved before."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from manifests.errors import RankError, ShardError
from manifests.slices import Slice
from runner.load.deferred import DeferredVerification
from runner.load.load import Read, Reading, read_all
from runner.load.verify_parts import PartRead, ToVerify, share_parts
from runner.tensors.local_shard import whole_pieces
from runner.training.gradient_norm import StepTotals
from stores.base import Range, Reader
from stores.bundles import TensorAt
from stores.local import LocalFile

pytestmark = pytest.mark.usefixtures("one_rank")

DATA = bytes(range(256))


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A file that is not read before the event is set."""

    path: Path
    released: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def nbytes(self) -> int:
        return LocalFile(self.path).nbytes

    def open(self, ranges: Sequence[Range]) -> Reader:
        assert self.released.wait(10)
        return LocalFile(self.path).open(ranges)


@pytest.fixture
def damaged(tmp_path: Path) -> HeldBack:
    (tmp_path / "shard").write_bytes(DATA[:-1] + b"\0")
    return HeldBack(tmp_path / "shard")


def tensor_in(file: HeldBack, expected: bytes = DATA) -> TensorAt:
    return TensorAt("w", "BF16", (128,), file, 0, 256, blake3(expected).digest())  # type: ignore[arg-type]


def deferred_of(*tensors: TensorAt) -> DeferredVerification:
    deferred = DeferredVerification(is_needed=True)
    deferred.add([ToVerify(at=tensor, parts=()) for tensor in tensors])
    return deferred


def test_a_checkpoint_waits_for_the_thread_and_gets_what_it_found(damaged: HeldBack) -> None:
    with deferred_of(tensor_in(damaged)) as deferred:
        deferred.start()
        assert not deferred.has_failed
        threading.Timer(0.05, damaged.released.set).start()
        with pytest.raises(ShardError) as error:
            deferred.finish()
        assert (error.value.code, error.value.exit_code) == ("shard.digest-mismatch", 3)
        assert error.value.where.endswith(f"{damaged}: 'w'")
        assert deferred.has_failed


def test_a_disk_that_does_not_answer_is_seen_for_as_long_as_something_is_verified(damaged: HeldBack) -> None:
    with deferred_of(tensor_in(damaged, damaged.path.read_bytes())) as deferred:
        assert deferred.timer.stalled_s == 0
        deferred.start()
        deadline_s = time.monotonic() + 10
        while not deferred.timer.stalled_s:
            assert time.monotonic() < deadline_s
        damaged.released.set()
        deferred.finish()
        assert deferred.timer.stalled_s == 0


def test_what_is_whole_is_verified_once(damaged: HeldBack) -> None:
    damaged.released.set()
    with deferred_of(tensor_in(damaged, damaged.path.read_bytes())) as deferred:
        deferred.finish()
        damaged.path.unlink()
        deferred.finish()
        assert not deferred.has_failed


@pytest.mark.parametrize(
    ("code", "found"),
    [("rank.not-finite", "shard.digest-mismatch"), ("rank.tied-weights-differ", "shard.digest-mismatch"),
     ("rank.lost", "rank.lost")],
)  # fmt: skip
def test_damage_is_reported_in_place_of_what_it_caused(damaged: HeldBack, code: str, found: str) -> None:
    damaged.released.set()
    with deferred_of(tensor_in(damaged)) as deferred:
        with pytest.raises((ShardError, RankError)) as error, deferred.comes_first():
            raise RankError("step 1", "the loss is nan", code=code)
        assert error.value.code == found


def test_every_rank_learns_with_the_totals_that_one_has_found_damage() -> None:
    totals = StepTotals([], (), device=torch.device("cpu"))
    assert [totals.reduce(0.5, 1, is_damaged=is_damaged).is_damaged for is_damaged in (False, True)] == [False, True]


def test_a_rank_may_have_nothing_to_read() -> None:
    assert read_all([]) == []


@pytest.mark.parametrize(("hashes", "num_left"), [(True, 0), (False, 1)])
def test_what_is_read_without_hashing_is_left_to_be_verified(tmp_path: Path, hashes: bool, num_left: int) -> None:
    (tmp_path / "shard").write_bytes(DATA)
    at = TensorAt("w", "BF16", (128,), LocalFile(tmp_path / "shard"), 0, 256, blake3(DATA).digest())
    (piece,) = whole_pieces({"w": torch.zeros(128, dtype=torch.bfloat16)})
    left = share_parts(read_all([Read(into=piece, at=at)], Reading(hashes=hashes)))
    assert piece.memory.view(torch.uint8).numpy().tobytes() == DATA
    assert left == [ToVerify(at=at, parts=({},))][:num_left]
    assert share_parts([PartRead(at=at, region=Slice(offset=(0,), shape=(9,), whole_shape=(128,)), digest=None)]) == [
        ToVerify(at=at, parts=({},))
    ]
