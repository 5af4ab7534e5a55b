"""Ranks that are told to stop, one of them or all: they save and end together, and what was saved goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.process.local_jobs import launched, wait_until_gone

STEPS = "60"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_signal_to_one_rank_stops_all_after_the_same_step_and_the_next_run_loses_nothing(
    packed: Path, tmp_path: Path, number: signal.Signals
) -> None:
    saving = ("--steps", STEPS, "--checkpoint", tmp_path / "history", "--resume", "auto")
    with launched(packed, tmp_path / "log", *saving) as run:
        run.wait_for_step(5)
        os.kill(run.ranks()[1], number)
        assert run.process.wait(timeout=60) == 130, run.said
    stopped = run.state
    assert stopped["ended"] == "stopped"
    assert f"stopped by a signal after step {stopped['step']}; " in run.said
    with launched(packed, tmp_path / "log", *saving) as again:
        assert again.process.wait(timeout=90) == 0, again.said
    assert (again.state["step"], again.state["ended"], again.state["code"]) == (60, "done", 0)
    with launched(packed, tmp_path / "whole", "--steps", STEPS) as whole:
        assert whole.process.wait(timeout=90) == 0, whole.said
    assert again.losses() == whole.losses()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, 130, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_ranks_whose_launcher_ends_save_and_end(
    packed: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    saving = ("--steps", "100000", "--checkpoint", tmp_path / "history")
    with launched(packed, tmp_path / "log", *saving) as run:
        run.wait_for_step(5)
        pids = run.ranks()
        run.process.send_signal(number)
        assert run.process.wait(timeout=60) == code, run.said
        wait_until_gone(pids, 30)
    assert run.state["ended"] == "stopped"
    manifest = json.loads((tmp_path / "history" / f"step-{run.state['step']:06d}" / "manifest.json").read_text())
    assert manifest["training"]["step"] == run.state["step"]
    assert "Traceback" not in run.said


@pytest.mark.slow
def test_stop_whose_save_fails_ends_with_what_a_rank_met_and_its_code(packed: Path, tmp_path: Path) -> None:
    history, temporary = tmp_path / "history", tmp_path / "tmp"
    temporary.mkdir()
    saving = ("--steps", "100000", "--checkpoint", history)
    with launched(packed, tmp_path / "log", *saving, TMPDIR=str(temporary)) as run:
        run.wait_for_step(5)
        shutil.rmtree(history)
        history.write_bytes(b"")
        run.process.send_signal(signal.SIGUSR2)
        assert run.process.wait(timeout=60) == 3, run.said
    (message,) = re.findall(r"^error: (.*)", run.said, re.MULTILINE)
    place = f"rank 0, stage 0, node {socket.gethostname()}: --checkpoint {history}"
    assert message == f"{place}: {history}/.lock cannot be read: Not a directory [output.unreadable]"
    assert (run.state["ended"], run.state["code"], run.state["error"]) == ("failed", 3, message)
    assert "Traceback" not in run.said
    assert not list(temporary.glob("runner-*"))


@pytest.mark.parametrize(
    ("steps", "code"), [("100000", 130), pytest.param("60", 0, marks=pytest.mark.slow)], ids=["stopped", "done"]
)
def test_run_whose_end_cannot_be_written_to_the_log_folder_ends_as_it_would(
    packed: Path, tmp_path: Path, steps: str, code: int
) -> None:
    with launched(packed, tmp_path / "log", "--steps", steps, "--checkpoint", tmp_path / "history") as run:
        run.wait_for_step(5)
        (run.log / "state.json").mkdir()  # a full disk would need root
        if code:
            os.kill(run.ranks()[1], signal.SIGUSR2)
        assert run.process.wait(timeout=60) == code, run.said
    assert run.said.count(f"note: {run.log}/state.json: cannot be written: Is a directory\n") == 1
    assert "Traceback" not in run.said
    assert "error: " not in run.said
    assert ("stopped by a signal after step" in run.said) == bool(code)


def test_stop_that_ranks_do_not_finish_in_time_is_no_stop_that_saved(packed: Path, tmp_path: Path) -> None:
    """As where a disk hangs; after --timeout, torchrun kills them."""
    with launched(packed, tmp_path / "log", "--steps", "100000", "--checkpoint", tmp_path / "history") as run:
        run.wait_for_step(3)
        run.wait_until(lambda: {beat["phase"] for beat in run.beats} == {"train"})  # not the heartbeats from before
        pids = run.ranks()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(timeout=60) == 5, run.said
        wait_until_gone(pids, 10)
    assert (run.state["ended"], run.state["code"], run.state["error_code"]) == ("failed", 5, "rank.killed")
    assert run.said.endswith(f"error: {run.state['error']}\n")
    assert list((tmp_path / "history").glob("step-*")) == []
