"""How many threads a rank computes with, and the GPU of others."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from runner.checkpoint.async_save import InFlight, SaveReport
from runner.distributed.smaller_world import run_in_world_of
from runner.distributed.world import num_threads


@pytest.mark.parametrize(
    ("given", "threads"), [("8", 8), ("4,2", 4), (" 3 ", 3), ("", 1), ("0", 1), ("-2", 1), ("x", 1)]
)
def test_threads_are_those_of_openmp_and_values_that_it_ignores_are_no_error(given: str, threads: int) -> None:
    """A job script that exports a variable of Slurm which is not set leaves an empty one."""
    assert num_threads({"OMP_NUM_THREADS": given}) == threads
    assert num_threads({}) == 1


def test_threads_that_ask_cuda_use_the_gpu_of_their_rank(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: torch's functions say what they were asked for."""
    used = dict[int, int]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.update({threading.get_ident(): device}))
    minute = timedelta(minutes=1)
    proving = run_in_world_of([0], minute, lambda rank: threading.get_ident(), usual=minute)
    with InFlight[SaveReport]("save") as saving:
        assert used == {proving: 3, saving._pool.submit(threading.get_ident).result(): 3}
