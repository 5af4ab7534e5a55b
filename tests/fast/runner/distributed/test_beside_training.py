"""Work beside training pauses while cores are busy, and is done at full speed when it is awaited."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest
import torch

from manifests.schema import WEIGHTS
from runner.checkpoint import save
from runner.distributed import rounds
from runner.distributed.rounds import run_beside_training
from runner.tensors.local_shard import whole_pieces


def compute(count: int) -> Generator[None, None, int]:
    """Take 4 ms of processor time in each step."""
    for _ in range(count):
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < 0.004:
            pass
        yield
    return count


def test_pauses_on_busy_cores_leave_a_twentieth_of_one() -> None:
    pauses_s: list[float] = []
    begun_s = time.thread_time()
    assert run_beside_training(compute(10), are_cores_busy=lambda: True, pause=pauses_s.append) == 10
    used_s = time.thread_time() - begun_s
    assert len(pauses_s) == 10
    assert 0.04 * 19 <= sum(pauses_s) <= used_s * 19 + 1e-6


def test_idle_cores_and_work_that_is_awaited_mean_no_pause() -> None:
    awaited, pauses_s = threading.Event(), list[float]()
    run_beside_training(compute(5), are_cores_busy=lambda: False, pause=pauses_s.append)
    assert not pauses_s

    def pause(seconds: float) -> None:
        pauses_s.append(seconds)
        if len(pauses_s) == 2:
            awaited.set()

    assert run_beside_training(compute(5), awaited.is_set, lambda: True, pause) == 5
    assert len(pauses_s) == 2


def test_error_of_the_work_is_the_callers() -> None:
    def fail() -> Generator[None, None, None]:
        yield
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        run_beside_training(fail())


@pytest.mark.parametrize(
    ("waited_ns", "num_running", "is_there"), [(0, 4, False), (0, 5, True), (1_999_999, 4, False), (2_000_001, 4, True)]
)
def test_a_wait_longer_than_a_slice_and_more_threads_than_cores_are_contention(
    monkeypatch: pytest.MonkeyPatch, waited_ns: int, num_running: int, is_there: bool
) -> None:
    files = {"thread-self/schedstat": "9 100 1", "loadavg": f"0.50 0.20 0.10 {num_running}/300 99"}
    monkeypatch.setattr(rounds, "_read_proc", files.__getitem__)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    contention = rounds._Contention()
    files["thread-self/schedstat"] = f"9 {100 + waited_ns} 1"
    assert contention.is_there() is is_there


def test_save_that_is_awaited_or_slower_than_the_floor_yields_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [100.0]
    monkeypatch.setattr(save.time, "monotonic", lambda: clock_s[0])
    state = {0: {WEIGHTS: whole_pieces({"a": torch.zeros(1 << 20)})}}  # 4 MiB: 1/32 s at 128 MiB/s
    hurries = save.hurrying(state, lambda: False)
    assert save.hurrying(state, lambda: True)()
    clock_s[0] += 0.03
    assert not hurries()
    clock_s[0] += 0.002
    assert hurries()
