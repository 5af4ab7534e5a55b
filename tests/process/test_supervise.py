"""How often a job is started again in its allocation, and what ends that; `srun` and `scontrol` are scripts here.

Real ones run in test_slurm.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
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
DONE = STOPS.replace("stopped", "done")
FAILS = """echo '{{"version": 1, "step": 0, "ended": "failed", "code": %d}}' > {place}/log/state.json; exit %d"""
LOSES = FAILS % (LOST, LOST)
# Waits of seconds, which nothing here comes late for.
HURRIED = (
    "from runner.launch import supervisor as supervise; supervise._LATE_S = 0.0; supervise._PAUSES_S = (0.0,) * 4; "
    "supervise._ANSWER_S = 0.5; supervise.main()"
)
STALE = """import errno, os
listdir = os.listdir
def faulty(path="."):
    if str(path) == {folder!r}:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
    return listdir(path)
os.listdir = faulty
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    code: int
    said: str
    attempts: list[str]
    requeued: bool
    state: dict[str, object] | None


def supervise(
    place: Path,
    does: str,
    *flags: str,
    shows: str = "JobState=RUNNING Reason=None",
    names: str = "echo node2; echo node10",
    requeues: str = ":",
    is_hurried: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run the supervisor of a job whose every attempt does what a line of shell says, and of which Slurm shows this.

    `names` is what `scontrol show hostnames` does, and `requeues` what `scontrol requeue` does first.
    """
    scripts = place / "bin"
    scripts.mkdir(exist_ok=True)
    (place / "requeued").unlink(missing_ok=True)
    scontrol = (
        f'case "$1 $2" in "show hostnames") {names};; "show job") [ "{shows}" ] && echo {shows};; '
        f"requeue*) echo >> {place}/asked; {requeues} && touch {place}/requeued;; esac"
    )
    for name, text in (
        ("srun", SRUN.format(place=place, does=does.format(place=place))),
        ("scontrol", f"#!/bin/bash\n{scontrol}\n"),
    ):
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    (place / "log").mkdir(exist_ok=True)
    program = ("-c", HURRIED) if is_hurried else ("-m", "runner.launch.supervisor")
    done = subprocess.run(
        [sys.executable, *program, "--nnodes", "2", "--nproc-per-node", "1", *flags, "packed", "--", "--data",
         "synthetic", "--log-dir", place / "log", "--checkpoint", place / "saved", "--checkpoint-every", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
             "SLURM_JOB_NODELIST": "node[2,10]", **(environment or {})},
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
    ended = supervise(tmp_path, SAVES + LOSES, "--restarts", "2")
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
    ended = supervise(tmp_path, LOSES, "--restarts", "5")
    assert (ended.code, len(ended.attempts)) == (LOST, 2)
    assert "error: no checkpoint since the last restart, from step 0: another one would end alike\n" in ended.said


def test_restart_that_leaves_no_newer_checkpoint_is_the_last_one(tmp_path: Path) -> None:
    ended = supervise(tmp_path, f"[ $attempt = 1 ] && {{{{ {SAVES} }}}}; {LOSES}", "--restarts", "5")
    assert (ended.code, len(ended.attempts)) == (LOST, 2)
    assert "error: no checkpoint since the last restart, from step 1: another one would end alike\n" in ended.said


def test_job_that_ends_well_after_a_loss_is_done(tmp_path: Path) -> None:
    ended = supervise(tmp_path, SAVES + f"[ $attempt = 2 ] && exit; {LOSES}", "--restarts", "5", "--requeue")
    assert (ended.code, len(ended.attempts), ended.requeued) == (0, 2, False)


@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_what_another_attempt_would_not_mend_ends_the_job(tmp_path: Path, code: int) -> None:
    ended = supervise(tmp_path, FAILS % (code, code), "--restarts", "5", "--requeue")
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


@pytest.mark.parametrize("code", [130, 128 + signal.SIGUSR2, 128 + signal.SIGTERM])
@pytest.mark.parametrize("flags", [(), ("--requeue",)])
def test_job_that_was_stopped_before_its_ranks_had_begun_is_queued_again_if_asked(
    flags: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    restarts = ("--restarts", "3") if flags else ()
    ended = supervise(tmp_path, f"exit {code}", *restarts, *flags, is_hurried=True)
    assert (ended.code, len(ended.attempts), ended.requeued) == (130, 1, bool(flags))
    assert ended.said == ("stopped; the job is queued again\n" if flags else "")


@pytest.mark.parametrize("code", [130, 128 + signal.SIGUSR2, 128 + signal.SIGTERM])
def test_job_that_ends_without_a_word_and_may_only_be_restarted_is(code: int, tmp_path: Path) -> None:
    ended = supervise(tmp_path, f"[ $attempt = 2 ] || exit {code}", "--restarts", "3", is_hurried=True)
    assert (ended.code, len(ended.attempts), ended.requeued) == (0, 2, False)
    assert ended.said == f"attempt 1 of 4 ended with code {code}; all ranks are started again, from step 0\n"


def test_job_that_was_cancelled_before_its_ranks_had_begun_is_not_restarted(tmp_path: Path) -> None:
    ended = supervise(tmp_path, "exit 143", "--restarts", "3", shows="JobState=COMPLETING Reason=None", is_hurried=True)
    assert (ended.code, len(ended.attempts), ended.said) == (130, 1, "")


@pytest.mark.parametrize("flags", [(), ("--requeue",)])
def test_save_that_failed_ends_the_job_although_it_was_told_to_stop(flags: tuple[str, ...], tmp_path: Path) -> None:
    ended = supervise(tmp_path, "kill -TERM $PPID; " + FAILS % (3, 3), "--restarts", "3", *flags)
    assert (ended.code, len(ended.attempts), ended.requeued) == (3, 1, False)
    assert ended.state is not None
    assert (ended.state["ended"], ended.state["code"]) == ("failed", 3)


def test_job_that_was_cancelled_before_its_ranks_had_begun_is_not_queued_again(tmp_path: Path) -> None:
    ended = supervise(tmp_path, "exit 143", "--requeue", shows="JobState=COMPLETING Reason=None", is_hurried=True)
    assert (ended.code, ended.requeued) == (130, False)


def test_job_that_was_told_to_stop_when_all_was_done_is_done(tmp_path: Path) -> None:
    ended = supervise(tmp_path, DONE + "exit 130", "--requeue")
    assert (ended.code, len(ended.attempts), ended.requeued) == (0, 1, False)


@pytest.mark.parametrize(
    ("does", "shows", "is_requeued"),
    [
        ("exit 130", "JobState=RUNNING PreemptTime=None", False),
        ("exit 130", "JobState=RUNNING PreemptTime=2026-11-21T12:00:00", True),
        ("exit 130", "", True),  # Slurm does not answer
        ("mkdir -p {place}/saved/step-000009 && touch {place}/saved/step-000009/manifest.json; exit 130",
         "JobState=RUNNING PreemptTime=None", True),
    ],
)  # fmt: skip
def test_job_that_ends_twice_in_a_row_without_a_word_or_a_checkpoint_is_not_queued_a_third_time(
    does: str, shows: str, is_requeued: bool, tmp_path: Path
) -> None:
    first = supervise(tmp_path, "exit 130", "--requeue", shows=shows, is_hurried=True)
    assert (first.code, first.requeued) == (130, True)
    second = supervise(
        tmp_path, does, "--requeue", shows=shows, is_hurried=True, environment={"SLURM_RESTART_COUNT": "1"}
    )
    assert (second.code, second.requeued) == (130, is_requeued)
    why = "stopped twice in a row without a word or a checkpoint since step 0: it would end alike again"
    assert (f"error: {why}\n" in second.said) is not is_requeued
    assert second.state is not None
    assert second.state["error"] == ("" if is_requeued else why)


def test_job_that_is_cancelled_the_second_time_is_not_said_to_have_failed(tmp_path: Path) -> None:
    supervise(tmp_path, "exit 143", "--requeue", is_hurried=True)
    again = {"SLURM_RESTART_COUNT": "1"}
    shows = "JobState=CANCELLED PreemptTime=None"
    ended = supervise(tmp_path, "exit 143", "--requeue", shows=shows, is_hurried=True, environment=again)
    assert (ended.code, ended.requeued, ended.said) == (130, False, "")
    assert ended.state is not None
    assert ended.state["ended"] == "stopped"


def test_checkpoints_that_cannot_be_listed_now_do_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sitecustomize.py").write_text(STALE.format(folder=str(tmp_path / "saved")))
    ended = supervise(tmp_path, LOSES, "--restarts", "2", environment={"PYTHONPATH": f"{tmp_path}/bin"})
    assert (ended.code, len(ended.attempts)) == (LOST, 3)
    said = [line for line in ended.said.splitlines() if not line.startswith(("note: ", "hint: "))]
    assert said == [
        "attempt 1 of 3 ended with code 5; all ranks are started again, from the newest checkpoint",
        "attempt 2 of 3 ended with code 5; all ranks are started again, from the newest checkpoint",
        "error: all 2 restarts are used up; the last checkpoint cannot be listed",
    ]
    assert f"note: {tmp_path}/saved: cannot be read: Stale file handle\n" in ended.said


def test_slurm_that_does_not_queue_a_job_again_at_first_is_asked_again(tmp_path: Path) -> None:
    refuses = f"[ $(wc -l < {tmp_path}/asked) = 2 ]"
    ended = supervise(tmp_path, STOPS, "--requeue", requeues=refuses)
    assert (ended.code, ended.requeued, ended.said) == (130, True, "stopped; the job is queued again\n")


def test_request_that_slurm_heard_and_did_not_answer_is_not_taken_for_refused(tmp_path: Path) -> None:
    says = f"[ $(wc -l < {tmp_path}/asked) = 1 ] && exec sleep 5; echo Job is pending execution for job 7 >&2; false"
    ended = supervise(tmp_path, STOPS, "--requeue", requeues=says, is_hurried=True)
    assert (ended.code, ended.said) == (130, "stopped; the job is queued again\n")


def test_job_that_slurm_does_not_queue_again_is_not_said_to_be(tmp_path: Path) -> None:
    problem = "slurm_requeue error: Unable to contact slurm controller"
    ended = supervise(tmp_path, STOPS, "--requeue", requeues=f"echo {problem} >&2; false", is_hurried=True)
    why = f"stopped, and Slurm does not queue the job again: {problem}\nhint: scontrol requeue 7"
    assert (ended.code, ended.requeued, ended.said) == (130, False, f"error: {why}\n")
    assert (tmp_path / "asked").read_text() == "\n" * 5
    assert ended.state is not None
    assert (ended.state["ended"], ended.state["code"], ended.state["error"]) == ("failed", 130, why)


def test_job_is_queued_again_although_slurm_does_not_say_whether_it_was_cancelled(tmp_path: Path) -> None:
    ended = supervise(tmp_path, STOPS, "--requeue", shows="$(sleep 5)", is_hurried=True)
    assert (ended.code, ended.requeued) == (130, True)


@pytest.mark.parametrize(
    ("names", "problem"),
    [("echo no slurm.conf >&2; exit 1", "scontrol: no slurm.conf"), (":", "scontrol: names no node of this job")],
)
def test_nodes_that_slurm_does_not_name_end_the_job_in_a_sentence(names: str, problem: str, tmp_path: Path) -> None:
    ended = supervise(tmp_path, ":", "--requeue", names=names)
    assert (ended.code, ended.attempts, ended.said) == (LOST, [], f"error: {problem}\n")
    assert ended.state is not None
    assert (ended.state["ended"], ended.state["code"], ended.state["error"]) == ("failed", LOST, problem)


def test_log_folder_that_takes_no_file_leaves_the_exit_code_as_it_is(tmp_path: Path) -> None:
    breaks = f"rm -rf {tmp_path}/log; touch {tmp_path}/log; exit {LOST}"
    ended = supervise(tmp_path, breaks, "--restarts", "2", is_hurried=True)
    assert (ended.code, len(ended.attempts)) == (LOST, 2)
    assert ended.said.splitlines()[1:] == [
        f"note: {tmp_path}/log/state.json cannot be removed: Not a directory",
        "error: no checkpoint since the last restart, from step 0: another one would end alike",
        f"note: {tmp_path}/log/state.json cannot be written: Not a directory",
    ]


def test_word_of_another_node_that_is_seen_late_counts(tmp_path: Path) -> None:
    ended = supervise(tmp_path, f"(sleep 0.5; {FAILS % (3, 3)}) & exit 130", "--restarts", "3", "--requeue")
    assert (ended.code, len(ended.attempts), ended.requeued) == (3, 1, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ""), ({"SLURM_CPUS_PER_TASK": "96"}, "96"), ({"SLURM_CPUS_PER_TASK": "96", "SRUN_CPUS_PER_TASK": "8"}, "8")],
)
def test_ranks_of_a_node_get_the_cpus_that_the_job_asked_for(
    given: dict[str, str], expected: str, tmp_path: Path
) -> None:
    supervise(tmp_path, "echo $SRUN_CPUS_PER_TASK > {place}/cpus", environment=given)
    assert (tmp_path / "cpus").read_text().strip() == expected
