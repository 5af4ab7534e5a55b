"""How often a job is started again in its allocation, and what ends that; `srun` and `scontrol` are scripts here.

Real ones run in test_slurm.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

ROOT = Path(__file__).parents[2]
LOST = 5  # the exit code of a job that lost a rank
SRUN = """#!/bin/bash
echo "$PET_MASTER_ADDR:$PET_MASTER_PORT" >> {place}/attempts
attempt=$(wc -l < {place}/attempts)
{does}
"""
SAVES = "mkdir -p {place}/saved/step-00000$attempt && touch {place}/saved/step-00000$attempt/manifest.json; "
STOPS = """echo '{{"version": 1, "step": 3, "ended": "stopped"}}' > {place}/log/state.json; """


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    code: int
    said: str
    attempts: list[str]
    requeued: bool
    state: dict[str, object] | None


def supervise(place: Path, does: str, *flags: str, shows: str = "JobState=RUNNING Reason=None") -> Ended:
    """Run the supervisor of a job whose every attempt does what a line of shell says, and of which Slurm shows this."""
    scripts = place / "bin"
    scripts.mkdir()
    scontrol = (
        f'case "$1 $2" in "show hostnames") echo node2; echo node10;; "show job") [ "{shows}" ] && echo {shows};; '
        f"requeue*) touch {place}/requeued;; esac"
    )
    for name, text in (
        ("srun", SRUN.format(place=place, does=does.format(place=place))),
        ("scontrol", f"#!/bin/bash\n{scontrol}\n"),
    ):
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    (place / "log").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "runner.life.supervise", "--nnodes", "2", "--nproc-per-node", "1", *flags, "packed",
         "--", "--data", "synthetic", "--log-dir", place / "log", "--checkpoint", place / "saved",
         "--checkpoint-every", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
             "SLURM_JOB_NODELIST": "node[2,10]"},
    )  # fmt: skip
    attempts, state = place / "attempts", place / "log" / "state.json"
    return Ended(
        code=done.returncode,
        said=done.stderr,
        attempts=attempts.read_text().splitlines() if attempts.exists() else [],
        requeued=(place / "requeued").exists(),
        state=json.loads(state.read_text()) if state.exists() else None,
    )


def test_job_that_loses_a_rank_each_time_ends_once_its_restarts_are_used_up(tmp_path: Path) -> None:
    ended = supervise(tmp_path, SAVES + f"exit {LOST}", "--restarts", "2")
    assert ended.code == LOST
    assert len(ended.attempts) == 3
    assert len(set(ended.attempts)) == 3, "an address was used twice"
    assert all(address.startswith("node2:") for address in ended.attempts)
    why = "all 2 restarts are used up; the last checkpoint is of step 3"
    assert ended.said.splitlines() == [
        "attempt 1 of 3 ended with code 5; all ranks are started again, from step 1",
        "attempt 2 of 3 ended with code 5; all ranks are started again, from step 2",
        f"error: {why}",
    ]
    assert ended.state is not None
    assert (ended.state["ended"], ended.state["code"], ended.state["error"]) == ("failed", LOST, why)


def test_job_that_saves_nothing_between_two_losses_is_not_started_a_third_time(tmp_path: Path) -> None:
    ended = supervise(tmp_path, f"exit {LOST}", "--restarts", "5")
    assert (ended.code, len(ended.attempts)) == (LOST, 2)
    assert "error: no checkpoint since the last restart, from step 0: another one would end alike\n" in ended.said


def test_job_that_ends_well_after_a_loss_is_done(tmp_path: Path) -> None:
    ended = supervise(tmp_path, SAVES + f"[ $attempt = 2 ] || exit {LOST}", "--restarts", "5", "--requeue")
    assert (ended.code, len(ended.attempts), ended.requeued) == (0, 2, False)


@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_what_another_attempt_would_not_mend_ends_the_job(tmp_path: Path, code: int) -> None:
    ended = supervise(tmp_path, f"exit {code}", "--restarts", "5", "--requeue")
    assert (ended.code, len(ended.attempts), ended.requeued) == (code, 1, False)


@pytest.mark.parametrize("flags", [(), ("--requeue",)])
def test_job_that_was_stopped_at_a_signal_is_queued_again_if_asked(tmp_path: Path, flags: tuple[str, ...]) -> None:
    ended = supervise(tmp_path, STOPS, "--restarts", "5", *flags)
    assert (ended.code, len(ended.attempts), ended.requeued) == (130, 1, bool(flags))
    assert ("stopped; the job is queued again" in ended.said) is bool(flags)


@pytest.mark.parametrize(
    ("shows", "is_requeued"),
    [
        ("JobState=RUNNING Reason=None", True),
        ("JobState=COMPLETING Reason=TimeLimit", True),
        ("JobState=COMPLETING Reason=None", False),  # scancel: CANCELLED once it has ended
        ("JobState=CANCELLED Reason=None", False),
        ("", True),  # Slurm does not answer
    ],
)
def test_job_is_queued_again_unless_it_was_cancelled(shows: str, is_requeued: bool, tmp_path: Path) -> None:
    ended = supervise(tmp_path, STOPS, "--requeue", shows=shows)
    assert (ended.code, ended.requeued) == (130, is_requeued)
