"""Ctrl-C and SIGTERM at any moment from a command's first line on: a word, exit code 130, and a state that says so."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.local_jobs import ROOT, SMALL, runner

NUMBERS = [signal.SIGINT, signal.SIGTERM]


def commands(packed: Path, folder: Path) -> dict[str, tuple[str | Path, ...]]:
    return {
        "launch": ("runner", "launch", packed, "--", *SMALL, "--steps", "100000", "--log-dir", folder / "log"),
        "eval": ("runner", "eval", packed, "--data", packed / "config.json"),
        "pack": ("reshard", "pack", packed, "--layout", "pp=1", "--out", folder / "out"),
    }


def start(*words: str | Path, prepare: Callable[[], object] = lambda: None) -> subprocess.Popen[str]:
    """Start a command; `prepare` is called in its process, where SIGHUP is not ignored, as below nohup."""

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        prepare()

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, preexec_fn=begin,
    )  # fmt: skip


def check_word(process: subprocess.Popen[str]) -> None:
    try:
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()  # its ranks end with it
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.count("interrupted") == 1, said


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("launch", signal.SIGINT),
        ("eval", signal.SIGTERM),
        ("pack", signal.SIGINT),
        pytest.param("launch", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("eval", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("pack", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_signal_that_waits_for_the_first_line_ends_a_command_with_a_word(
    verb: str, number: signal.Signals, packed: Path, tmp_path: Path
) -> None:
    """It is blocked when Python starts, and sent before: it comes when the command takes it, and not later."""
    process = start(
        *commands(packed, tmp_path)[verb], prepare=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    )
    process.send_signal(number)
    check_word(process)
    assert list(tmp_path.iterdir()) == []


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_agent(pid: int) -> bool:
    return "runner.launch.agent.agent" in words_of(pid)


def imports_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def has_ranks(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (is_agent, signal.SIGTERM),
        (imports_torch, signal.SIGINT),
        (imports_torch, signal.SIGUSR2),
        pytest.param(is_agent, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(imports_torch, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(imports_torch, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(has_ranks, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(has_ranks, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_signal_while_a_job_begins_ends_it_with_a_word_and_it_counts_as_stopped(
    moment: Callable[[int], bool], number: signal.Signals, packed: Path, tmp_path: Path
) -> None:
    process = start(*commands(packed, tmp_path)["launch"])
    deadline = time.monotonic() + 60
    while not moment(process.pid):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    check_word(process)
    found = json.loads(runner("status", tmp_path / "log", "--json").stdout)
    assert found["state"] == "STOPPED"


def test_launch_that_waits_for_a_scheduler_ends_at_a_signal(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log folder has a job of it on record, which may still run."""
    record = {"scheduler": "slurm", "id": "7", "name": "theirs", "output": str(tmp_path / "log" / "slurm-7.out")}
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "job.json").write_text(json.dumps(record))
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked; exec sleep 50\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    process = start(*commands(packed, tmp_path)["launch"])
    while not (tmp_path / "asked").exists():
        assert process.poll() is None
        time.sleep(0.05)
    sent_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    check_word(process)
    assert time.monotonic() < sent_s + 30


def test_second_ctrl_c_ends_a_command_that_waits_for_a_store_without_an_answer() -> None:
    """The main thread is in a request, from which Python's handlers are not run."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
                       "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                       "AWS_REGION": "us-east-1"}  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "reshard", "inspect", "s3://bucket/model"], cwd=ROOT, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with silent.accept()[0], process:
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline() != ""  # it says what it waits for
            process.send_signal(signal.SIGINT)
            check_word(process)


@pytest.mark.parametrize("number", NUMBERS)
def test_signal_that_the_caller_ignores_is_ignored(number: signal.Signals, packed: Path, tmp_path: Path) -> None:
    process = start(*commands(packed, tmp_path)["pack"], prepare=lambda: signal.signal(number, signal.SIG_IGN))
    process.send_signal(number)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)


DEFERS = """
import time
from manifests.command.signals import deferred, interrupts
with interrupts() as interruptible:
    interruptible()
    try:
        with deferred():
            print("begun", flush=True)
            for _ in range(20):
                time.sleep(0.05)
            print("whole", flush=True)
        print("too late")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_signal_that_is_deferred_waits_whichever_thread_receives_it(number: signal.Signals) -> None:
    """A thread watches for a second Ctrl-C, and receives what the main thread has blocked."""
    command = [sys.executable, "-c", DEFERS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.communicate(timeout=60)[0] == "whole\ninterrupted\n"
