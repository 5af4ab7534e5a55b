"""What a run waits for before its first step, told from what its ranks have left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from runner.launch.agent import agent as waiting
from runner.launch.agent.agent import find_awaited, print_waiting
from runner.rundir.heartbeat import Beat, heartbeat_path, log_path, write_beat

BEGUN = 1_000_000.0


def log(folder: Path, rank: int, at: float = BEGUN + 5) -> None:
    log_path(folder, rank).write_text("loaded")
    os.utime(log_path(folder, rank), (at, at))


def beat(folder: Path, rank: int, phase: str = "train") -> None:
    heartbeat_path(folder, rank).parent.mkdir(exist_ok=True)
    write_beat(
        heartbeat_path(folder, rank),
        Beat(rank=rank, stages=(rank,), host="h", pid=1, step=0, phase=phase, time=BEGUN + 9),
    )


def waits_for(folder: Path) -> str | None:
    return find_awaited(folder, 2, since=BEGUN, position=len(OLD))


OLD = b'{"step": 1, "loss": 2.0}\n'  # of the attempt before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_bytes(OLD)
    log(tmp_path, 0, BEGUN - 100)
    return tmp_path


def test_ranks_are_followed_from_import_to_the_first_step(folder: Path) -> None:
    assert "2 of 2 ranks to import" in str(waits_for(folder))
    log(folder, 0)
    assert "1 of 2 ranks to import" in str(waits_for(folder))
    log(folder, 1)
    beat(folder, 0)
    assert "1 of 2 ranks to meet and load" in str(waits_for(folder))
    beat(folder, 1)
    assert "first step" in str(waits_for(folder))
    with open(folder / "metrics.jsonl", "ab") as metrics:
        metrics.write(b'{"step": 1, "loss": 2.0}\n')
    assert waits_for(folder) is None


def test_ten_seconds_count_from_the_launch_and_not_from_the_import_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "_POLL_S", 0.001)
    monkeypatch.setattr(waiting.time, "time", lambda: 1012.0)
    with print_waiting(tmp_path, 2, 1000.0):
        until = time.monotonic() + 60
        while not (said := capsys.readouterr().err) and time.monotonic() < until:
            time.sleep(0.001)
    assert said.startswith("12 s: waiting for 2 of 2 ranks")
