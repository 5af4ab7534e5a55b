"""Signals that reach the agent of a node while its ranks save, or after they have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.forked import Forked

ROOT = Path(__file__).parents[4]
Process = Forked | subprocess.Popen[bytes]
# What `runner launch` tells the agent about signals.
HANDLED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2", "--shutdown-timeout", "60")
SAVES = """
import pathlib, signal, sys, threading, time
from runner.rundir.exit_report import is_stopping

def main():
    folder, asked = pathlib.Path(sys.argv[1]), threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: asked.set())
    assert not is_stopping()
    (folder / "began").touch()
    while not asked.wait(0.1):
        pass
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        time.sleep(0.1)
    assert is_stopping()
    (folder / "saved").touch()
"""
ENDS = """
import os, signal, tempfile

if "RANK" not in os.environ:  # the agent, which clears up
    cleanup = tempfile.TemporaryDirectory.cleanup
    tempfile.TemporaryDirectory.cleanup = lambda folder: (os.kill(os.getpid(), signal.SIGTERM), cleanup(folder))

def main():
    pass
"""


@contextmanager
def agent(worker: str, folder: Path, *, is_below_nohup: bool = False) -> Iterator[Process]:
    """Start the agent with one rank, which runs this code; what they say goes to a file.

    It is forked, unless SIGHUP is ignored in it from the start.
    """
    (folder / "worker.py").write_text(worker)
    words = ("--standalone", "--nproc-per-node", "1", *HANDLED, "-m", "worker", str(folder))
    environment, said = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}, folder / "said"
    process: Process
    if is_below_nohup:
        with open(said, "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runner.launch.agent.agent", *words], env=environment, stderr=errors,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
            )  # fmt: skip
    else:
        process = Forked(words, environment, folder / "output", said, "runner.launch.agent.agent")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until_begun(folder: Path, process: Process) -> None:
    deadline_s = time.monotonic() + 60
    while not (folder / "began").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_agent_that_is_asked_to_stop_many_times_waits_until_its_rank_has_saved(tmp_path: Path) -> None:
    with agent(SAVES, tmp_path) as process:
        wait_until_begun(tmp_path, process)
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.3)
        assert process.wait(timeout=60) == 130
        assert (tmp_path / "saved").exists()
    assert (tmp_path / "said").read_text() == "interrupted by SIGTERM\n"


def test_job_below_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with agent(SAVES, tmp_path, is_below_nohup=True) as process:
        wait_until_begun(tmp_path, process)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=4.5)
        assert not (tmp_path / "saved").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
    assert (tmp_path / "said").read_text() == "interrupted by SIGTERM\n"


def test_signal_after_all_ranks_have_ended_well_is_no_failure(tmp_path: Path) -> None:
    with agent(ENDS, tmp_path) as process:
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "said").read_text() == ""
