"""torchrun's agent: of several nodes, the one whose rank failed reports; the others report only if it does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner.launch.agent import agent
from runner.rundir.exit_report import ExitReport
from runner.rundir.records import RunState, write_state

OWN = ExitReport(kind="failed", code=3, where="rank 2, node n", problem="is damaged", error_code="shard.damaged")


class Clock:
    """A simulated clock; at `report_s` the agent of another node reports."""

    def __init__(self, log_dir: Path, report_s: float) -> None:
        self.now_s, self.log_dir, self.report_s = 0.0, log_dir, report_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        if self.now_s < self.report_s <= self.now_s + duration_s:
            write_state(self.log_dir, RunState(step=0, ended="failed", code=3))
        self.now_s += duration_s


@pytest.mark.parametrize(
    ("cause", "report_s", "is_silent"),
    [
        (OWN, 0.05, False),
        (replace(OWN, is_elsewhere=True), 20, True),  # its ranks end late on a loaded node
        (replace(OWN, is_elsewhere=True), 40, False),
        (replace(OWN, kind="lost", code=5), 3, True),
        (replace(OWN, kind="lost", code=5), 10, False),
    ],
)
def test_one_node_reports(
    cause: ExitReport, report_s: float, is_silent: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["agent", "--nnodes", "2"])
    monkeypatch.setattr(agent, "time", Clock(tmp_path, report_s))
    assert agent._report(cause, tmp_path, ()) == cause.code
    assert (capsys.readouterr().err == "") is is_silent
