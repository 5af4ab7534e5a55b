"""Which of several nodes' agents reports the error that ended a job; each agent here is this process."""

from __future__ import annotations

import errno
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runner.launch.agent import agent
from runner.rundir.exit_report import REPORTS, ExitReport, is_stopping
from runner.rundir.records import RunState, read_state, write_state

LOST = ExitReport(kind="lost", code=5, where="rank 1, stage 1, node m", problem="closed", error_code="rank.lost")
REPORTED = RunState(step=7, ended="failed", code=3, error="rank 0: bad", error_code="shard.digest-mismatch")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log folder of two nodes: this one looks for `state.json` before the other has written it."""
    monkeypatch.setattr(sys, "argv", ["agent", "--nnodes", "2"])
    sleep = time.sleep

    def wait(seconds: float) -> None:
        write_state(tmp_path, REPORTED)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", wait)
    return tmp_path


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide files that were looked for too early until their folder is opened, as NFS does."""
    read_bytes, listdir, missing = Path.read_bytes, os.listdir, set[Path]()

    def read(path: Path) -> bytes:
        if path in missing or not path.exists():
            missing.add(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return read_bytes(path)

    def open_folder(folder: Path) -> list[str]:
        missing.difference_update([path for path in missing if path.parent == folder])
        return listdir(folder)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(os, "listdir", open_folder)


@pytest.mark.usefixtures("cached")
def test_lost_rank_replaces_no_error_that_another_node_has_reported(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent._report(LOST, log, ())
    assert (read_state(log), capsys.readouterr().err) == (REPORTED, "")


@pytest.mark.parametrize(
    ("cause", "code"),
    [(LOST, REPORTED.code), (replace(LOST, kind="failed", code=2, is_elsewhere=True), 2)],
    ids=["lost", "elsewhere"],
)
def test_agent_exits_with_the_code_of_the_error_that_another_node_has_reported(
    log: Path, cause: ExitReport, code: int
) -> None:
    """Kubernetes restarts a JobSet whose first pod to end exits with 5, and none where that has a code from 1 to 4."""
    assert agent._report(cause, log, ()) == code


@pytest.mark.parametrize(
    "state", [REPORTED, RunState(step=7, ended="stopped"), None], ids=["failed", "stopped", "none"]
)
def test_signal_to_a_node_is_one_to_the_job_unless_another_node_has_reported_an_error(
    state: RunState | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and Kubernetes stop all other nodes where one has failed: their ranks wait for one that is gone."""
    log, reports = tmp_path / "log", tmp_path / "reports"
    for folder in (log, reports):
        folder.mkdir()
    if state is not None:
        write_state(log, state)
    monkeypatch.setenv(REPORTS, str(reports))
    agent._note_stopping(reports, log)
    assert is_stopping() == (state != REPORTED)
