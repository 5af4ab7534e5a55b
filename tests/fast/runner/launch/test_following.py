"""What `--follow` makes of what a scheduler says, or does not: `scontrol` and `kubectl` are scripts here."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from manifests.errors import UserError
from runner.launch import schedulers
from runner.launch import verbs as watch
from runner.rundir.records import Ended, JobRecord, RunState, write_state

SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
RUNNING = "echo JobState=RUNNING"
COMPLETED = "echo JobState=COMPLETED ExitCode=0:0"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers, "POLL_S", 0.0)


def follow(place: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> int:
    """Follow a job to its end; `scontrol` does these one after the other, the last one for ever."""
    cases = "".join(f"{number}) {does};; " for number, does in enumerate(answers[:-1], 1))
    script, asked = place / "scontrol", shlex.quote(str(place / "asked"))
    script.write_text(f"#!/bin/bash\necho >> {asked}; case $(wc -l < {asked}) in {cases}*) {answers[-1]};; esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    record = JobRecord(scheduler="slurm", id="7", name="tiny", output=str(place / "slurm-7.out"))
    return watch.follow_job(record, Path(record.output), lambda text: None, place)


@pytest.mark.parametrize(
    ("shown", "ended", "code"),
    [
        (COMPLETED, "done", 0),
        ("echo JobState=FAILED ExitCode=130:0", "stopped", 130),
        ("echo JobState=PREEMPTED ExitCode=0:15", "stopped", 130),
        ("echo JobState=PREEMPTED ExitCode=0:15", None, 5),
        ("echo JobState=CANCELLED ExitCode=0:15", "stopped", 130),
        ("echo JobState=CANCELLED ExitCode=0:15", "done", 0),
        ("echo JobState=TIMEOUT ExitCode=0:15", None, 5),
        (FORGOTTEN, "done", 0),
        (FORGOTTEN, "stopped", 130),
        (FORGOTTEN, "failed", 3),
        (FORGOTTEN, None, 5),
    ],
)
def test_job_that_is_over_gives_its_code(
    shown: str, ended: Ended | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ended is not None:
        write_state(tmp_path, RunState(step=3, ended=ended, code=3 if ended == "failed" else 0))
    assert follow(tmp_path, monkeypatch, shown) == code


@pytest.mark.parametrize("word", ["PENDING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED"])
def test_job_that_will_run_again_is_followed_on(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert follow(tmp_path, monkeypatch, f"echo JobState={word}", COMPLETED) == 0


def test_controller_that_is_silent_for_a_while_does_not_end_the_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follow(tmp_path, monkeypatch, RUNNING, SILENT, SILENT, RUNNING, SILENT, COMPLETED) == 0


def test_controller_that_stays_silent_ends_the_follower_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SILENT_S", 0.02)
    (place := tmp_path / "a b").mkdir()
    with pytest.raises(UserError) as silent:
        follow(place, monkeypatch, RUNNING, SILENT)
    assert (silent.value.code, silent.value.where) == ("launch.scheduler-failed", "scontrol")
    assert shlex.split(silent.value.hint)[-4:] == ["runner", "logs", str(place), "-f"]


def test_controller_that_has_never_answered_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="Unable to contact slurm controller"):
        follow(tmp_path, monkeypatch, SILENT)
    assert (tmp_path / "asked").read_text() == "\n"


def test_follower_whose_reader_has_ended_does_not_wait_for_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubectl").write_text(
        "#!/bin/sh\ncase $1 in logs) echo '[pod/tiny-0/runner] step 1'; exec sleep 600;; esac\n"
        "case $2 in pods) echo Running;; *) echo '{\"metadata\": {}}';; esac\n"
    )
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def show(text: str) -> None:
        raise BrokenPipeError

    record = JobRecord(scheduler="jobset", id="tiny", name="tiny", output="")
    with pytest.raises(BrokenPipeError):
        watch.follow_job(record, Path(record.output), show, tmp_path)
