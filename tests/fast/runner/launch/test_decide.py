"""What follows an attempt of a supervised job, case by case."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runner.config.flags import parse_training
from runner.launch.agent import agent
from runner.launch.decide import AttemptEnd, Decision, Exit, GiveUp, Requeue, Restart, decide, may_requeue
from runner.rundir.exit_report import ExitReport
from runner.rundir.records import RunState, write_state

LOST = 5
TERMINATED, PREEMPTED_NOW, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGUSR2, 130
RUNNING = "JobState=RUNNING PreemptTime=None"
PREEMPTED = "JobState=RUNNING PreemptTime=2026-11-21T12:00:00"
CANCELLED = "JobState=COMPLETING Reason=None"
SILENT = RunState(step=4, ended="stopped", code=INTERRUPTED)


def unused() -> str:
    raise AssertionError("not needed for this decision")


def end(**changes: object) -> AttemptEnd:
    """An attempt that lost a rank, the first of four; fields that are not used cannot be asked for."""
    lost = AttemptEnd(
        code=LOST,
        state=None,
        attempt=0,
        restarts=3,
        requeue=False,
        is_signalled=False,
        newest_step=unused,  # type: ignore[arg-type]
        has_saved=unused,  # type: ignore[arg-type]
        shown=unused,
    )
    asked = ("newest_step", "has_saved", "shown")
    return replace(lost, **{name: (lambda found=value: found) if name in asked else value
                            for name, value in changes.items()})  # type: ignore[arg-type]  # fmt: skip


def left(ended: str, code: int = 0) -> RunState:
    return RunState(step=4, ended=ended, code=code)  # type: ignore[arg-type]


TABLE = {
    "all steps taken": (end(code=0, state=left("done")), Exit(code=0)),
    "ranks that train nothing": (end(code=0), Exit(code=0)),
    "asked to stop when all was done": (end(code=TERMINATED, state=left("done"), requeue=True), Exit(code=0)),
    "a bug": (end(code=1, state=left("failed", 1)), Exit(code=1)),
    "bad input, and asked to stop": (end(code=3, state=left("failed", 3), is_signalled=True, requeue=True),
                                     Exit(code=3)),
    "bad input, unwritten": (end(code=3), Exit(code=3)),
    "stopped": (end(code=INTERRUPTED, state=left("stopped")), Exit(code=INTERRUPTED)),
    "stopped, to be requeued": (end(code=INTERRUPTED, state=left("stopped"), requeue=True), Requeue()),
    "stopped with code 0": (end(code=0, state=left("stopped"), requeue=True), Requeue()),
    "lost a rank as it was stopped": (end(is_signalled=True), Exit(code=INTERRUPTED)),
    "lost a rank as it was stopped, to be requeued": (end(is_signalled=True, requeue=True), Requeue()),
    "silent, never to be restarted": (end(code=INTERRUPTED, restarts=0), Exit(code=INTERRUPTED)),
    "silent, cancelled": (end(code=TERMINATED, shown=CANCELLED), Exit(code=INTERRUPTED)),
    "silent, running": (end(code=TERMINATED, shown=RUNNING, newest_step=4), Restart(step=4)),
    "silent, Slurm does not answer": (end(code=TERMINATED, shown="", newest_step=4), Restart(step=4)),
    "silent, to be requeued": (end(code=PREEMPTED_NOW, requeue=True, newest_step=4), Requeue(state=SILENT)),
    "silent again after another end": (end(code=TERMINATED, requeue=True, newest_step=4, num_requeues=1,
                                           former=left("done")), Requeue(state=SILENT)),
    "silent twice": (
        end(code=TERMINATED, requeue=True, newest_step=4, num_requeues=1, former=SILENT, has_saved=False,
            shown=RUNNING),
        GiveUp(code=INTERRUPTED, why=""),
    ),
    "silent twice, preempted": (end(code=TERMINATED, requeue=True, newest_step=4, num_requeues=1, former=SILENT,
                                    has_saved=False, shown=PREEMPTED), Requeue(state=SILENT)),
    "silent twice, Slurm does not answer": (end(code=TERMINATED, requeue=True, newest_step=4, num_requeues=1,
                                                former=SILENT, has_saved=False, shown=""), Requeue(state=SILENT)),
    "silent twice, cancelled": (end(code=TERMINATED, requeue=True, newest_step=4, num_requeues=1, former=SILENT,
                                    has_saved=False, shown=CANCELLED), Requeue(state=SILENT)),
    "silent twice with a checkpoint between": (end(code=TERMINATED, requeue=True, newest_step=5, num_requeues=1,
                                                   former=SILENT), Requeue(state=replace(SILENT, step=5))),
    "silent twice, an earlier checkpoint between": (end(code=TERMINATED, requeue=True, newest_step=4, num_requeues=1,
                                                        former=SILENT, has_saved=True), Requeue(state=SILENT)),
    "silent twice, checkpoints unknown": (end(code=TERMINATED, requeue=True, newest_step=None, num_requeues=1,
                                              former=SILENT), Requeue(state=replace(SILENT, step=0))),
    "lost a rank": (end(newest_step=4), Restart(step=4)),
    "lost a rank, to be restarted before it is requeued": (end(newest_step=4, requeue=True), Restart(step=4)),
    "lost a rank, failure written": (end(state=left("failed", LOST), newest_step=4), Restart(step=4)),
    "lost a rank, checkpoints unknown": (end(attempt=1, newest_step=None, has_saved=True), Restart(step=None)),
    "lost another after a checkpoint": (end(attempt=1, newest_step=5, has_saved=True), Restart(step=5)),
    "lost another after an earlier checkpoint": (end(attempt=1, newest_step=4, has_saved=True), Restart(step=4)),
    "lost another without a checkpoint": (
        end(attempt=1, newest_step=4, has_saved=False),
        GiveUp(code=LOST, why=""),
    ),
    "lost another before any checkpoint": (end(attempt=1, newest_step=0, has_saved=False), GiveUp(code=LOST, why="")),
    "lost another, the newest unknown": (end(attempt=1, newest_step=None, has_saved=False), GiveUp(code=LOST, why="")),
    "lost the last": (end(attempt=3, newest_step=5, has_saved=True),
                      GiveUp(code=LOST, why="")),
    "lost the last, checkpoints unknown": (
        end(attempt=3, newest_step=None, has_saved=True),
        GiveUp(code=LOST, why=""),
    ),
    "lost a rank, never to be restarted": (end(restarts=0, newest_step=4), Exit(code=LOST)),
}  # fmt: skip


@pytest.mark.parametrize(("ended", "action"), TABLE.values(), ids=TABLE.keys())
def test_what_follows_an_attempt(ended: AttemptEnd, action: Decision, wording: Callable[[str], None]) -> None:
    found = decide(ended)
    if isinstance(found, GiveUp):
        wording(found.why)
        found = replace(found, why="")
    assert found == action


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (RUNNING, True),
        ("JobState=COMPLETING Reason=TimeLimit", True),
        (CANCELLED, False),
        ("JobState=CANCELLED Reason=None", False),
        ("", True),  # Slurm does not answer
    ],
)
def test_stopped_job_goes_back_to_the_queue_unless_it_was_cancelled(shown: str, expected: bool) -> None:
    assert may_requeue(shown) is expected


# torchrun's agent: of several nodes, the one whose rank failed reports; the others report only if it does not.


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
    assert agent._report(cause, tmp_path, ()) == (3 if is_silent else cause.code)
    assert (capsys.readouterr().err == "") is is_silent


@pytest.mark.parametrize(("state", "code"), [(left("done"), 0), (left("stopped"), INTERRUPTED), (None, INTERRUPTED)])
def test_signal_after_the_last_step_does_not_fail_a_run_that_is_done(
    state: RunState | None, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if state is not None:
        write_state(tmp_path, state)
    options = parse_training(["--data", "synthetic", "--log-dir", str(tmp_path), "--checkpoint", str(tmp_path / "c")])
    assert agent._stop(signal.SIGTERM, (), options, 0.0) == code
    assert (capfd.readouterr().err == "") is (code == 0)
