"""A job on this machine, looked at, read and ended by its log folder, by whoever did not launch it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.process.forked import Forked
from tests.process.local_jobs import ROOT, SMALL, forked_runner, launched, wait_until_gone

# Of two launches from this folder: each waits for the other when it looks at the clock, which stands still.
AT_ONCE = """
import datetime, os, pathlib, time
from runner.launch import run_folder

class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        folder = pathlib.Path(__file__).parent
        (folder / f"{os.getpid()}.waits").touch()
        while len(list(folder.glob("*.waits"))) < 2:
            time.sleep(0.01)
        return cls(2026, 11, 28)

run_folder.datetime = Clock
os.chdir(pathlib.Path(__file__).parent)
"""


def status(log: Path) -> dict[str, Any]:
    done = forked_runner("status", log, "--json")
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_job_is_watched_and_cancelled_by_its_log_folder_and_saves(packed: Path, tmp_path: Path) -> None:
    log, history = tmp_path / "log", tmp_path / "history"
    saving = ("--checkpoint", history, "--checkpoint-every", "3", "--resume", "auto")
    with launched(packed, log, "--steps", "100000", *saving) as run:
        run.wait_until(lambda: "saved" in run.said)
        assert run.said.startswith(f"starting 2 ranks; log in {log}\n")
        found = status(log)
        assert (found["scheduler"], found["state"], found["nodes"]) == ("local", "RUNNING", socket.gethostname())
        assert found["id"] == str(run.process.pid)
        assert found["last_step"] >= 3
        assert Path(found["last_checkpoint"]).parent == history
        assert (found["error"], found["silent_ranks"]) == (None, [])
        assert time.time() - (log / "heartbeat/launcher").stat().st_mtime < 30
        lines = forked_runner("status", log).stdout.splitlines()
        assert lines[0] == f"pp2: local job {run.process.pid} is RUNNING on {socket.gethostname()}"
        assert lines[1].startswith("step ")
        assert " step 1/100000  loss " in forked_runner("logs", log).stdout
        assert "[rank 1 stage 1] loaded" in forked_runner("logs", log, "--rank", "1").stdout
        second = forked_runner("launch", packed, "--log-dir", log, "--", "--data", "synthetic")
        assert second.returncode == 2
        assert second.stderr.startswith(f"error: --log-dir {log}: ")
        assert f"process {run.process.pid}" in second.stderr
        follower = [sys.executable, "-m", "runner.cli", "logs", log, "-f"]
        following = subprocess.Popen(follower, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        pids = run.ranks()
        assert forked_runner("cancel", log).stdout == f"{log}: cancelled local job {run.process.pid} (pp2)\n"
        assert run.process.wait(timeout=60) == 130, run.said
        assert "stopped by a signal after step" in following.communicate(timeout=60)[0]
        wait_until_gone(pids, 1)
    found = status(log)
    assert found["state"] == "STOPPED"
    assert found["last_checkpoint"] == str(history / f"step-{run.state['step']:06d}")
    assert forked_runner("cancel", log).returncode == 0  # it has ended, and stays as it is


def test_forced_cancel_kills_launcher_and_ranks_at_once(packed_alone: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launched(packed_alone, log, "--steps", "100000", "--checkpoint", tmp_path / "history") as run:
        run.wait_for_step(3)
        pids = run.ranks()
        begun_s = time.monotonic()
        assert forked_runner("cancel", log, "--force").returncode == 0
        wait_until_gone([*pids, run.process.pid], 5)
        assert time.monotonic() - begun_s < 30
    assert status(log)["state"] == "KILLED"
    assert not list((tmp_path / "history").glob("step-*"))


def test_process_that_has_the_jobs_number_by_chance_is_not_the_job(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        record = {"version": 1, "scheduler": "local", "id": str(stranger.pid), "name": "tiny", "output": "",
                  "host": socket.gethostname(), "birth": "another boot 17"}  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(record))
        assert status(tmp_path)["state"] == "KILLED"
        for force in ((), ("--force",)):
            assert forked_runner("cancel", tmp_path, *force).returncode == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_job_of_another_machine_is_not_looked_for_here(tmp_path: Path) -> None:
    record = {"version": 1, "scheduler": "local", "id": str(os.getpid()), "name": "tiny", "output": "",
              "host": "elsewhere", "birth": "another boot 17"}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(record))
    for verb in ("status", "cancel"):
        done = forked_runner(verb, tmp_path)
        assert done.returncode == 3
        assert done.stderr.startswith(f"error: job {os.getpid()}: runs on elsewhere, ")


def test_runs_that_are_launched_in_the_same_second_have_folders_of_their_own(
    packed_alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_ONCE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = ["launch", str(packed_alone), "--", *SMALL, "--steps", "1", "--quiet"]
    errors = [tmp_path / "errors-1", tmp_path / "errors-2"]
    running = [Forked(words, environment, Path(os.devnull), file) for file in errors]
    try:
        codes = [process.wait(110) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [(code, file.read_text()) for code, file in zip(codes, errors, strict=True)] == [(0, ""), (0, "")]
    names = sorted(path.parent.name for path in tmp_path.glob("runner-log/2*/state.json"))
    assert names == [f"20261128-000000-{packed_alone.name}", f"20261128-000000-{packed_alone.name}-2"]


def test_job_trains_on_a_machine_that_does_not_know_its_name(packed_alone: Path, tmp_path: Path) -> None:
    """torchrun would wait minutes for a store at that address."""
    (tmp_path / "sitecustomize.py").write_text('import socket\nsocket.getfqdn = lambda name="": "no.such.host"\n')
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    with launched(packed_alone, tmp_path / "log", "--steps", "1", PYTHONPATH=path) as run:
        assert run.process.wait(timeout=90) == 0, run.said
