"""Ranks whose disks take longer than ranks wait for each other, do not answer, or have a damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import flip, llama_config, pack, weights_path, write_model
from tests.process.torchrun import started


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_model(tmp_path / "source", llama_config(num_hidden_layers=2))
    return pack(tmp_path / "source", tmp_path / "packed")


def load(packed: Path, **environment: str) -> list[str]:
    """Return what each of two ranks says."""
    with started(2, "runner/load/loading_worker.py", packed, **environment) as ranks:
        assert [rank.wait(40) for rank in ranks] == [0, 0], ranks[1].said
        return [rank.said for rank in ranks]


def test_rank_may_read_longer_than_the_others_wait_for_it(packed: Path) -> None:
    assert load(packed, SLOW_S="0.5", TIMEOUT_S="4") == 2 * ["loaded\n"]


def test_rank_whose_disk_does_not_answer_is_named_on_all(packed: Path) -> None:
    assert load(packed, SLOW_S="600", TIMEOUT_S="4") == 2 * ["store.stalled at rank 1: load\n"]


def test_damaged_shard_is_reported_while_another_rank_still_reads(packed: Path) -> None:
    flip(packed / weights_path(0, 2), -5)
    first, second = load(packed, SLOW_S="600", TIMEOUT_S="60")
    assert first == second
    assert first.startswith(f"shard.digest-mismatch at rank 0: {packed / weights_path(0, 2)}: ")
