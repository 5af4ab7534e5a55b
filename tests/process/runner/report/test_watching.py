"""What a job leaves for those who watch it: metrics for other tools, a page, and the collectives of stuck ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.flight_recorder.components.loader import read_dump

from manifests.module_times import read_times
from tests.process.local_jobs import SMALL, forked_runner, launched
from tests.process.runner.training_jobs import losses_of
from tests.process.torchrun import started


def test_run_that_is_watched_leaves_event_files_an_offline_run_and_a_page(packed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    asked = ("--steps", "6", "--trace", "3-5", "--log-every", "4", "--tensorboard", "--wandb", "--log-dir", log)
    words, silent = (packed / "manifest.json", *SMALL, *asked), {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with started(2, "../../runner/train.py", *words, **silent) as ranks:
        assert [rank.wait(120) for rank in ranks] == [0, 0], ranks[0].said
        said = ranks[0].said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("step ")] == ["4/6", "6/6"]
    losses = losses_of(log)
    assert len(losses) == 6
    (events,) = (log / "tensorboard").iterdir()
    (offline,) = (log / "wandb").glob("offline-run-*/run-*.wandb")
    for path in (events, offline):
        assert b"communication_s/1" in path.read_bytes()

    times = read_times(log / "times.json")
    assert 0 <= times.fixed_share <= 1
    step = times.step
    assert step is not None
    assert step.link is not None, said
    assert min(step.link.rate, step.link.shard_rate) > 0

    page = tmp_path / "page.html"
    done = forked_runner("report", log, "--out", page)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{page}: 6 steps, loss {losses[0]:.4f} to {losses[-1]:.4f}; ")
    for heading in ("Loss", "Throughput", "Where the time of a step goes", "Memory"):
        assert f"<h2>{heading}" in page.read_text()


@pytest.mark.slow
def test_stuck_ranks_leave_what_their_flight_recorders_hold_as_large_as_the_user_said(
    packed: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    asked = ("--steps", "100000", "--timeout", "60", "--step-timeout", "8")
    with launched(packed, log, *asked, TORCH_FR_BUFFER_SIZE="3") as run:
        run.wait_for_step(5)
        first, second = run.ranks()
        os.kill(second, signal.SIGSTOP)
        dump = log / "flight-recorder" / "rank_0"
        run.wait_until(lambda: dump.exists() and dump.stat().st_size > 0, limit_s=30)
        os.kill(second, signal.SIGCONT)
        os.kill(first, signal.SIGKILL)
        assert run.process.wait(timeout=60) == 5, run.said
    found = read_dump("rank_", str(dump))
    assert found["rank"] == 0
    entries = found["entries"]
    assert isinstance(entries, list)
    assert len(entries) == 3
    assert all(entry["profiling_name"].startswith("gloo:") for entry in entries)
