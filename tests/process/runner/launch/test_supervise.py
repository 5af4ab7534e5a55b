"""A job's supervisor restarts, requeues and gives up; `srun` and `scontrol` are scripts here.

What it decides is in tests/fast/runner/launch/test_decide.py; real Slurm runs in test_slurm.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.process.forked import Forked

ROOT = Path(__file__).parents[4]
LOST = 5  # the exit code of a job that lost a rank
SRUN = """#!/bin/bash
trap : USR2
echo "$PET_MASTER_ADDR:$PET_MASTER_PORT" >> {place}/attempts
attempt=$(wc -l < {place}/attempts)
{does}
"""
SAVES = "mkdir -p {place}/saved/step-00000$attempt && touch {place}/saved/step-00000$attempt/manifest.json; "
STOPS = """echo '{{"version": 1, "step": 3, "ended": "stopped"}}' > {place}/log/state.json; """
FAILS = """echo '{{"version": 1, "step": 0, "ended": "failed", "code": %d}}' > {place}/log/state.json; exit %d"""
LOSES = FAILS % (LOST, LOST)
RESTART = re.compile(r"attempt \d of \d exited .* step (\d)$")
MODULE, HURRIED = "runner.launch.supervisor", "tests.process.runner.launch.hurried_supervisor"
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
    log: IO[str] | None = None,
) -> Ended:
    """Run the supervisor of a job whose every attempt does what a line of shell says, and of which Slurm shows this.

    `names` is what `scontrol show hostnames` does, and `requeues` what `scontrol requeue` does first. What
    the supervisor says goes to the `log`, if there is one: then Python is started for it.
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
    saving = ("--log-dir", f"{place}/log", "--checkpoint", f"{place}/saved", "--checkpoint-every", "1")
    words = ("--nnodes", "2", "--nproc-per-node", "1", *flags, "packed", "--", "--data", "synthetic", *saving)
    path = f"{scripts}:{os.environ['PATH']}"
    job = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[2,10]", **(environment or {})}
    if log is None:
        code, said = fork(words, {**os.environ, **job}, place / "said", HURRIED if is_hurried else MODULE)
    else:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, *words], cwd=ROOT, env={**os.environ, **job}, stderr=log, timeout=50
        )
        code, said = done.returncode, ""
    attempts, state = place / "attempts", place / "log" / "state.json"
    return Ended(
        code=code,
        said=said,
        attempts=attempts.read_text().splitlines() if attempts.exists() else [],
        requeued=(place / "requeued").exists(),
        state=json.loads(state.read_text()) if state.exists() else None,
    )


def fork(words: Sequence[str], environment: Mapping[str, str], said: Path, module: str) -> tuple[int, str]:
    """Return the exit code of the supervisor, and what it says."""
    said.unlink(missing_ok=True)
    process = Forked(words, environment, Path(os.devnull), said, module)
    try:
        return process.wait(50), said.read_text()
    finally:
        process.kill()


def test_job_that_loses_a_rank_each_time_ends_once_its_restarts_are_used_up(tmp_path: Path) -> None:
    ended = supervise(tmp_path, SAVES + LOSES, "--restarts", "2", environment={"SLURM_JOB_ID": "1900"})
    assert ended.code == LOST
    assert all(int(address.rpartition(":")[2]) < 32768 for address in ended.attempts), "of other connections"
    assert len(ended.attempts) == 3
    assert len(set(ended.attempts)) == 3, "an address was used twice"
    assert all(address.startswith("node2:") for address in ended.attempts)
    assert [found[1] for found in map(RESTART.match, ended.said.splitlines()) if found] == ["1", "2"]
    assert ended.state is not None
    assert (ended.state["ended"], ended.state["code"], ended.state["step"]) == ("failed", LOST, 0)
    assert f"error: {ended.state['error']}\n" in ended.said


def test_ranks_get_the_scripts_environment_where_a_site_submits_jobs_without_one(tmp_path: Path) -> None:
    """Source: sbatch(1), --export: it sets SLURM_EXPORT_ENV, and without a flag of its own srun exports that."""
    does = 'case " $* " in *" --export=ALL "*) exit 0;; esac; [ "$SLURM_EXPORT_ENV" != NONE ]'
    assert supervise(tmp_path, does, environment={"SLURM_EXPORT_ENV": "NONE"}).code == 0


@pytest.mark.parametrize(
    ("former", "state", "is_recorded"),
    [(None, "RUNNING", True), ("6", "FAILED", True), ("6", "RUNNING", False), ("7", "RUNNING", False)],
)
def test_job_that_its_launcher_did_not_hear_of_is_on_record(
    former: str | None, state: str, is_recorded: bool, tmp_path: Path
) -> None:
    job, output = tmp_path / "log" / "job.json", f"{tmp_path}/log/slurm-%s.out"
    if former is not None:
        job.parent.mkdir()
        theirs = {"scheduler": "slurm", "id": former, "name": "theirs", "output": output % former}
        job.write_text(json.dumps(theirs))
    shows = f"JobState={state} Reason=None"
    assert supervise(tmp_path, ":", shows=shows, environment={"SLURM_JOB_NAME": "tiny"}).code == 0
    record = json.loads(job.read_text())
    number, name = ("7", "tiny") if is_recorded else (former, "theirs")
    assert (record["id"], record["name"], record["output"]) == (number, name, output % number)


def test_ranks_that_srun_could_not_start_are_restarted(tmp_path: Path) -> None:
    """Source: srun(1), SLURM_EXIT_ERROR: the exit code of Slurm's own errors, by default 1."""
    ended = supervise(tmp_path, "[ $attempt = 2 ] || exit ${{SLURM_EXIT_ERROR:-1}}", "--restarts", "1")
    assert (ended.code, len(ended.attempts)) == (0, 2)


def test_restarted_run_that_is_done_has_code_0_although_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    does = f"[ $attempt = 2 ] || {{{{ {LOSES}; }}}}"
    with open("/dev/full", "w") as full:
        ended = supervise(tmp_path, does, "--restarts", "1", log=full, environment={"PYTHONUNBUFFERED": ""})
    assert (ended.code, len(ended.attempts)) == (0, 2)


def test_restart_that_leaves_no_newer_checkpoint_is_the_last_one(tmp_path: Path) -> None:
    ended = supervise(tmp_path, f"[ $attempt = 1 ] && {{{{ {SAVES} }}}}; {LOSES}", "--restarts", "5")
    assert (ended.code, len(ended.attempts)) == (LOST, 2)
    assert [found[1] for found in map(RESTART.match, ended.said.splitlines()) if found] == ["1"]


def test_checkpoints_before_a_damaged_newest_one_or_in_its_place_let_the_job_restart(tmp_path: Path) -> None:
    damaged = tmp_path / "saved" / "step-000009" / "manifest.json"
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    replaces = "mv {place}/saved/step-000009 {place}/saved/step-000009.set-aside-1; mkdir {place}/saved/step-000009; "
    replaces += "echo >> {place}/saved/step-000009/manifest.json; "
    saves = f"case $attempt in 3) {replaces};; 4) ;; *) {SAVES};; esac; "
    ended = supervise(tmp_path, saves + LOSES, "--restarts", "5")
    assert (ended.code, len(ended.attempts)) == (LOST, 4)
    assert "from step 9" not in ended.said  # where ranks resume, they say


@pytest.mark.parametrize("flags", [(), ("--requeue",)])
def test_job_that_was_stopped_at_a_signal_is_queued_again_if_asked(tmp_path: Path, flags: tuple[str, ...]) -> None:
    ended = supervise(tmp_path, STOPS, "--restarts", "5", *flags)
    assert (ended.code, len(ended.attempts), ended.requeued) == (130, 1, bool(flags))
    assert bool(ended.said) is bool(flags)


@pytest.mark.parametrize("does", ["exit 143", STOPS])
def test_job_that_was_cancelled_is_not_queued_again(does: str, tmp_path: Path) -> None:
    ended = supervise(tmp_path, does, "--requeue", shows="JobState=COMPLETING Reason=None", is_hurried=True)
    assert (ended.code, ended.requeued, ended.said) == (130, False, "")
    assert ended.state is not None
    assert ended.state["ended"] == "stopped"


@pytest.mark.parametrize("flags", [(), ("--requeue",)])
def test_save_that_failed_ends_the_job_although_it_was_told_to_stop(flags: tuple[str, ...], tmp_path: Path) -> None:
    ended = supervise(tmp_path, "kill -TERM $PPID; " + FAILS % (3, 3), "--restarts", "3", *flags)
    assert (ended.code, len(ended.attempts), ended.requeued) == (3, 1, False)
    assert ended.state is not None
    assert (ended.state["ended"], ended.state["code"]) == ("failed", 3)


def test_job_whose_supervisor_is_asked_to_stop_as_a_rank_is_lost_is_queued_again(tmp_path: Path) -> None:
    ended = supervise(tmp_path, "kill -TERM $PPID; " + LOSES, "--restarts", "3", "--requeue")
    assert (ended.code, len(ended.attempts), ended.requeued) == (130, 1, True)


@pytest.mark.parametrize("signal", ["TERM", "USR2"])
def test_signal_to_the_supervisor_alone_reaches_the_ranks(signal: str, tmp_path: Path) -> None:
    does = f"stop() {{{{ {STOPS} exit 130; }}}}; trap stop USR2; kill -{signal} $PPID; sleep 20 >/dev/null 2>&1 & wait"
    ended = supervise(tmp_path, does, "--requeue")
    assert (ended.code, len(ended.attempts), ended.requeued) == (130, 1, True)
    assert ended.state is not None
    assert ended.state["step"] == 3


@pytest.mark.parametrize("is_preempted", [False, True])
def test_job_that_ends_twice_in_a_row_without_a_state_is_not_queued_a_third_time_unless_preempted(
    is_preempted: bool, tmp_path: Path
) -> None:
    shows = f"JobState=RUNNING PreemptTime={'2026-11-21T12:00:00' if is_preempted else 'None'}"
    first = supervise(tmp_path, "exit 130", "--requeue", shows=shows, is_hurried=True)
    assert (first.code, first.requeued) == (130, True)
    again = {"SLURM_RESTART_COUNT": "1"}
    second = supervise(tmp_path, "exit 130", "--requeue", shows=shows, is_hurried=True, environment=again)
    assert (second.code, second.requeued) == (130, is_preempted)
    assert second.state is not None
    assert second.state["ended"] == ("stopped" if is_preempted else "failed")


def test_checkpoints_that_cannot_be_listed_now_do_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sitecustomize.py").write_text(STALE.format(folder=str(tmp_path / "saved")))
    ended = supervise(tmp_path, LOSES, "--restarts", "2", environment={"PYTHONPATH": f"{tmp_path}/bin"})
    assert (ended.code, len(ended.attempts)) == (LOST, 3)
    assert "Stale file handle" in ended.said


@pytest.mark.parametrize("is_hurried", [False, True])  # it refuses twice; it refuses each time
def test_slurm_that_does_not_queue_a_job_again_is_asked_again(is_hurried: bool, tmp_path: Path) -> None:
    refuses = f"[ $(wc -l < {tmp_path}/asked) = {9 if is_hurried else 2} ]"
    ended = supervise(tmp_path, STOPS, "--requeue", requeues=f"{refuses} || {{ echo busy >&2; false; }}",
                      is_hurried=is_hurried)  # fmt: skip
    assert (ended.code, ended.requeued) == (130, not is_hurried)
    assert (tmp_path / "asked").read_text() == "\n" * (5 if is_hurried else 2)
    assert ended.state is not None
    assert ended.state["ended"] == ("failed" if is_hurried else "stopped")
    assert (ended.state.get("code") == 130) is is_hurried
    assert ("busy\nhint: scontrol requeue 7" in str(ended.state.get("error"))) is is_hurried


def test_request_that_slurm_heard_and_did_not_answer_is_not_taken_for_refused(tmp_path: Path) -> None:
    says = f"[ $(wc -l < {tmp_path}/asked) = 1 ] && exec sleep 5; echo Job is pending execution for job 7 >&2; false"
    ended = supervise(tmp_path, STOPS, "--requeue", requeues=says, is_hurried=True)
    assert ended.code == 130
    assert "error:" not in ended.said


@pytest.mark.parametrize(
    ("names", "problem"),
    [("echo no slurm.conf >&2; exit 1", "scontrol: no slurm.conf"), (":", "scontrol: names no node of this job")],
)
def test_nodes_that_slurm_does_not_name_end_the_job_in_a_sentence(names: str, problem: str, tmp_path: Path) -> None:
    ended = supervise(tmp_path, ":", "--requeue", names=names)
    assert (ended.code, ended.attempts, ended.said) == (LOST, [], f"error: {problem} [launch.scheduler-failed]\n")
    assert ended.state is not None
    assert (ended.state["ended"], ended.state["code"]) == ("failed", LOST)
    assert ended.state["error_code"] == "launch.scheduler-failed"


def test_log_folder_that_takes_no_file_leaves_the_exit_code_as_it_is(tmp_path: Path) -> None:
    breaks = f"rm -rf {tmp_path}/log; touch {tmp_path}/log; exit {LOST}"
    ended = supervise(tmp_path, breaks, "--restarts", "2", is_hurried=True)
    assert (ended.code, len(ended.attempts)) == (LOST, 2)
    assert ended.said.count(f"note: {tmp_path}/log/state.json") == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ""), ({"SLURM_CPUS_PER_TASK": "96"}, "96"), ({"SLURM_CPUS_PER_TASK": "96", "SRUN_CPUS_PER_TASK": "8"}, "8")],
)
def test_ranks_of_a_node_get_the_cpus_that_the_job_asked_for(
    given: dict[str, str], expected: str, tmp_path: Path
) -> None:
    supervise(tmp_path, "echo $SRUN_CPUS_PER_TASK > {place}/cpus", environment=given)
    assert (tmp_path / "cpus").read_text().strip() == expected
