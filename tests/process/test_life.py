"""Ranks that are told to stop, that hang and that die: all of them end soon, and what was saved goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fast.runner.tiny import save_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--data", "synthetic", "--seq-len", "16", "--global-batch", "8", "--timeout", "8")
STEPS = "60"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "tied", tie_word_embeddings=True)
    command = [
        sys.executable,
        "-m",
        "reshard.cli",
        "pack",
        folder / "tied",
        "--layout",
        "pp=2",
        "--out",
        folder / "pp2",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return folder / "pp2"


class Run:
    """A launched job, its log folder and the processes of its ranks."""

    def __init__(self, packed: Path, log: Path, *training: str | Path) -> None:
        self.log, self.output = log, log / "output"
        log.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "runner.cli", "launch", packed, "--", *SMALL, "--log-dir", log, *training]
        with open(self.output, "a") as stream:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=stream, stderr=stream
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def ranks(self) -> list[int]:
        """Give the processes of the ranks, by rank."""
        beats = [json.loads(path.read_text()) for path in sorted((self.log / "heartbeat").glob("rank-*.json"))]
        return [beat["pid"] for beat in beats]

    def losses(self) -> list[float]:
        lines = map(json.loads, (self.log / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    def wait_until(self, is_so: Callable[[], bool], limit_s: float = 60) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)


@contextmanager
def launched(packed: Path, log: Path, *training: str | Path) -> Iterator[Run]:
    run = Run(packed, log, *training)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGUSR2, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signal_to_one_rank_stops_all_after_the_same_step_and_the_next_run_loses_nothing(
    packed: Path, tmp_path: Path, number: signal.Signals
) -> None:
    saving = ("--steps", STEPS, "--checkpoint", tmp_path / "history", "--resume", "auto")
    with launched(packed, tmp_path / "log", *saving) as run:
        run.wait_until(lambda: "step 5/" in run.said)
        os.kill(run.ranks()[1], number)
        assert run.process.wait(timeout=60) == 130, run.said
    stopped = json.loads((tmp_path / "log" / "state.json").read_text())
    assert stopped["ended"] == "stopped"
    assert f"stopped at a signal after step {stopped['step']}, and saved\nhint: --resume auto goes on\n" in run.said
    with launched(packed, tmp_path / "log", *saving) as again:
        assert again.process.wait(timeout=90) == 0, again.said
    assert json.loads((tmp_path / "log" / "state.json").read_text()) == {"version": 1, "step": 60, "ended": "done"}
    with launched(packed, tmp_path / "whole", "--steps", STEPS) as whole:
        assert whole.process.wait(timeout=90) == 0, whole.said
    assert again.losses() == whole.losses()


def test_killed_rank_ends_the_others_within_seconds_and_leaves_no_process(packed: Path, tmp_path: Path) -> None:
    with launched(packed, tmp_path / "log", "--steps", "100000") as run:
        run.wait_until(lambda: "step 5/" in run.said)
        pids = run.ranks()
        begun = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        assert run.process.wait(timeout=60) == 5, run.said
        assert time.monotonic() - begun < 30
    assert are_gone(pids)
    assert "error: rank 1 (stage 1): ended by SIGKILL; all ranks were stopped" in run.said
    assert run.said.count("error:") == 1, run.said


@pytest.mark.slow
def test_hanging_rank_ends_the_job_within_its_timeout_and_half_a_minute(packed: Path, tmp_path: Path) -> None:
    with launched(packed, tmp_path / "log", "--steps", "100000") as run:
        run.wait_until(lambda: "step 5/" in run.said)
        pids = run.ranks()
        begun = time.monotonic()
        os.kill(pids[1], signal.SIGSTOP)
        assert run.process.wait(timeout=90) == 5, run.said
        assert time.monotonic() - begun < 8 + 45
    assert are_gone(pids)


def test_step_that_does_not_end_is_shown_thread_by_thread(packed: Path, tmp_path: Path) -> None:
    with launched(packed, tmp_path / "log", "--steps", "100000", "--timeout", "60", "--step-timeout", "3") as run:
        run.wait_until(lambda: "step 5/" in run.said)
        first, second = run.ranks()
        os.kill(second, signal.SIGSTOP)
        run.wait_until(lambda: "no step has ended for 3 s" in run.said, limit_s=30)
        os.kill(second, signal.SIGCONT)
        assert run.process.wait(timeout=60) == 5, run.said
    assert are_gone([first, second])
    assert "Current thread" in run.said or "Thread 0x" in run.said
