"""`--loading broadcast`: a rank without memory on its device ends the ranks of its stage, too."""

from __future__ import annotations

from pathlib import Path

from tests.process.torchrun import launch


def test_rank_that_cannot_allocate_is_named_before_others_wait_for_its_broadcast(packed: Path) -> None:
    first, last = launch(2, "runner/load/broadcast_worker.py", packed)
    assert first.splitlines() == ["rank.internal-error of rank 1"]
    assert last.splitlines() in (["AssertionError"], ["RuntimeError"], ["AcceleratorError"])
