"""What `runner status`, `logs` and `cancel` say of a job by its log folder; no job runs here."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from manifests.errors import InputError, LaunchError, UsageError
from runner.commands import cli
from runner.launch import verbs as watch
from runner.launch.agent import agent as waiting
from runner.launch.agent.agent import find_awaited, print_waiting
from runner.rundir.records import (
    Beat,
    Ended,
    JobRecord,
    RunState,
    heartbeat_path,
    log_path,
    write_beat,
    write_job_record,
    write_run_record,
    write_state,
)

LOAD: dict[str, Any] = {"rank": 0, "load_s": 0.1}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log folder of a job of this machine that has ended."""
    output, host = str(log_path(tmp_path, 0)), socket.gethostname()
    write_job_record(tmp_path, JobRecord(scheduler="local", id="1", name="x", output=output, host=host, birth="never"))
    return tmp_path


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 5.0 - number}


def saved(number: int) -> dict[str, Any]:
    return {"step": number, "checkpoint": f"ck/{number}"}


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        ((LOAD, step(1), step(2), saved(2), step(3)), (3, 2.0, "ck/2")),
        ((LOAD, step(1), step(2), step(3), saved(2)), (3, 2.0, "ck/2")),  # saved beside steps
        ((LOAD, step(1), saved(1), LOAD), (None, None, None)),
        ((LOAD, step(1), step(2), saved(2), LOAD, step(1)), (1, 4.0, None)),
        ((LOAD, step(1), step(2), saved(2), LOAD, step(1), step(2), step(3)), (3, 2.0, None)),
        ((LOAD, step(1), step(2), saved(2), LOAD, step(3)), (3, 2.0, "ck/2")),  # it went on from there
        ((LOAD, step(1), saved(1), step(2), {**saved(2), "save_error": "full"}), (2, 3.0, "ck/1")),
    ],
)
def test_status_is_of_the_last_run_alone(log: Path, lines: tuple[dict[str, Any], ...], last: tuple[Any, ...]) -> None:
    (log / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = watch.find_status(log)
    assert (found["last_step"], found["last_loss"], found["last_checkpoint"]) == last


def test_status_has_the_steps_of_the_whole_run(log: Path) -> None:
    (log / "metrics.jsonl").write_text(json.dumps(step(3)) + "\n")
    assert watch.find_status(log)["num_steps"] is None
    write_run_record(log, {"id": "x", "launches": [{"options": {"steps": 10}, "resolved": {"steps": 12}}]})
    assert watch.find_status(log)["num_steps"] == 12
    assert CliRunner().invoke(cli, ["status", str(log)]).stdout.splitlines()[1] == "step 3 of 12, loss 2.000000"


def test_watched_status_is_shown_again_when_it_changes_until_the_job_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "_WATCHED_S", 0.0)
    looks = iter([(True, ["a", "b"]), (True, ["a", "b"]), None, (True, ["c"]), (False, ["d"])])
    watch.show_changes(lambda: next(looks), is_repeated=True)
    assert capsys.readouterr().out.split() == ["a", "b", "c", "d"]
    assert not list(looks)


def test_watched_status_outlives_a_scheduler_that_does_not_answer_once(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_WATCHED_S", 0.0)
    write_job_record(log, JobRecord(scheduler="slurm", id="7", name="x", output=str(log / "slurm-7.out")))
    answers = ("echo JobState=RUNNING", "exit 1", "echo JobState=COMPLETED ExitCode=0:0")
    script = tmp_path / "scontrol"
    cases = "".join(f"{number}) {does};; " for number, does in enumerate(answers, 1))
    script.write_text(f"#!/bin/bash\necho >> {tmp_path}/calls; case $(wc -l < {tmp_path}/calls) in {cases}esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = CliRunner().invoke(cli, ["status", str(log), "--watch"])
    assert (done.exit_code, [line.split()[-1] for line in done.stdout.splitlines()]) == (0, ["RUNNING", "COMPLETED"])


def test_watched_status_of_a_job_that_has_ended_is_shown_once(log: Path) -> None:
    write_state(log, RunState(step=3, ended="done"))
    plain, watched = (CliRunner().invoke(cli, ["status", str(log), *flags]) for flags in ((), ("--watch",)))
    assert watched.stdout == plain.stdout
    refused = CliRunner().invoke(cli, ["status", str(log), "--watch", "--json"]).exception
    assert isinstance(refused, UsageError)
    assert refused.code == "options.conflict"


def test_list_has_every_run_of_a_folder_newest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new", "elsewhere")):
        folder = tmp_path / name
        folder.mkdir()
        host = "another-host" if name == "elsewhere" else socket.gethostname()
        write_job_record(folder, JobRecord(
            scheduler="local", id="1", name=name, output=str(log_path(folder, 0)), host=host, birth="never",
        ))  # fmt: skip
        os.utime(folder / "job.json", (number, number))
    new = tmp_path / "new"
    (new / "metrics.jsonl").write_text(json.dumps(LOAD) + "\n" + json.dumps(step(3)) + "\n")
    write_run_record(new, {"id": "x", "launches": [{"resolved": {"steps": 12, "layout": "pp=2,tp=2"}}]})
    write_state(new, RunState(step=3, ended="stopped"))
    (new / "heartbeat").mkdir()
    write_beat(heartbeat_path(new, 0), Beat(rank=0, stages=(0,), host="h", pid=1, step=3, phase="step", time=5.0))
    (tmp_path / "latest").symlink_to("new")
    (tmp_path / "no-run").mkdir()
    shown = json.loads(CliRunner().invoke(cli, ["list", str(tmp_path), "--json"]).stdout)
    rows = [(run.get("name"), run["state"], run.get("last_step"), run.get("layout")) for run in shown["runs"]]
    assert rows == [(None, "UNKNOWN", None, None), ("new", "STOPPED", 3, "pp=2,tp=2"), ("old", "KILLED", None, None)]
    assert shown["runs"][1]["last_heartbeat_s"] == 5.0
    lines = CliRunner().invoke(cli, ["list", str(tmp_path)]).stdout.splitlines()
    assert [line.split()[:4] for line in lines[2:3]] == [["new", "STOPPED", "3/12", "2.0000"]]
    assert [line.split() for line in CliRunner().invoke(cli, ["list", str(new)]).stdout.splitlines()][1][0] == "new"
    refused = CliRunner().invoke(cli, ["list", str(tmp_path / "no-run")]).exception
    assert isinstance(refused, LaunchError)
    assert refused.code == "launch.no-record"


@pytest.mark.parametrize(
    "record",
    [{"layout": 5}, {"layout": ["pp=2"]}, {"checkpoint": "/c\0k"}, "[" * 200_000],
    ids=["number", "list", "zero byte", "deep"],
)
def test_damaged_record_of_a_run_hides_neither_it_nor_others(tmp_path: Path, record: str | dict[str, object]) -> None:
    for name in ("damaged", "whole"):
        folder = tmp_path / name
        folder.mkdir()
        write_job_record(folder, JobRecord(
            scheduler="local", id="1", name=name, output="x", host=socket.gethostname(), birth="never",
        ))  # fmt: skip
        write_run_record(folder, {"id": "x", "launches": [{"resolved": {"steps": 12}}]})
        (folder / "metrics.jsonl").write_text(json.dumps(LOAD) + "\n" + json.dumps(step(3)) + "\n")
    text = record if isinstance(record, str) else json.dumps({"id": "x", "launches": [{"resolved": record}]})
    (tmp_path / "damaged" / "run.json").write_text(text)
    for words in (["list", str(tmp_path)], ["status", str(tmp_path / "damaged")]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.exception
        assert "damaged" in done.stdout


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["run.json", "state.json", "heartbeat/rank-00000.json"])
def test_record_that_is_a_pipe_is_not_waited_for(log: Path, name: str) -> None:
    (log / "heartbeat").mkdir(exist_ok=True)
    (log / name).unlink(missing_ok=True)
    os.mkfifo(log / name)
    for verb in ("status", "list"):
        done = CliRunner().invoke(cli, [verb, str(log)])
        assert done.exit_code == 0, done.exception


@pytest.mark.timeout(30)
def test_job_record_that_is_a_pipe_is_refused(log: Path) -> None:
    (log / "job.json").unlink()
    os.mkfifo(log / "job.json")
    refused = CliRunner().invoke(cli, ["status", str(log)]).exception
    assert isinstance(refused, LaunchError)
    assert refused.code == "launch.bad-record"


@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_job_that_has_ended_is_not_said_to_be_cancelled(log: Path, flags: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["cancel", str(log), *flags])
    assert (done.exit_code, done.stdout) == (0, f"{log}: local job 1 (x) has ended already\n")


@pytest.mark.parametrize("rank_0", ["", "now error: rank 0: bad\nhint: mend it\n"])
def test_logs_of_a_failed_job_say_why_once(log: Path, rank_0: str) -> None:
    write_state(log, RunState(step=0, ended="failed", code=3, error="rank 0: bad\nhint: mend it"))
    log_path(log, 0).write_text(f"step 1\n{rank_0}")
    done = CliRunner().invoke(cli, ["logs", str(log)])
    assert done.stdout.startswith("step 1\n")
    assert done.stdout.count("error: rank 0: bad\nhint: mend it\n") == 1


def test_rank_that_a_job_never_had_is_not_said_to_come(log: Path, wording: Callable[[str], None]) -> None:
    for rank in (0, 1):
        log_path(log, rank).write_text("")
    states: tuple[Ended | None, ...] = (None, "stopped", "done")  # a stopped job may be requeued
    for ended in states:
        if ended:
            write_state(log, RunState(step=3, ended=ended))
        with pytest.raises(InputError) as error:
            watch.show_logs(log, print, rank=7, is_followed=False)
        assert (error.value.code, error.value.where) == ("launch.no-log", str(log_path(log, 7)))
        if ended != "stopped":
            wording(str(error.value))


# What a run waits for before its first step, told from what its ranks have left.


BEGUN = 1_000_000.0


def waiting_log(folder: Path, rank: int, at: float = BEGUN + 5) -> None:
    log_path(folder, rank).write_text("loaded")
    os.utime(log_path(folder, rank), (at, at))


def beat(folder: Path, rank: int, phase: str = "train") -> None:
    heartbeat_path(folder, rank).parent.mkdir(exist_ok=True)
    write_beat(
        heartbeat_path(folder, rank),
        Beat(rank=rank, stages=(rank,), host="h", pid=1, step=0, phase=phase, time=BEGUN + 9),
    )


def waits_for(folder: Path) -> str | None:
    return find_awaited(folder, 2, since=BEGUN, position=len(OLD))


OLD = b'{"step": 1, "loss": 2.0}\n'  # of the attempt before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_bytes(OLD)
    waiting_log(tmp_path, 0, BEGUN - 100)
    return tmp_path


def test_ranks_are_followed_from_import_to_the_first_step(folder: Path) -> None:
    assert "2 of 2 ranks to import" in str(waits_for(folder))
    waiting_log(folder, 0)
    assert "1 of 2 ranks to import" in str(waits_for(folder))
    waiting_log(folder, 1)
    beat(folder, 0)
    assert "1 of 2 ranks to meet and load" in str(waits_for(folder))
    beat(folder, 1)
    assert "first step" in str(waits_for(folder))
    with open(folder / "metrics.jsonl", "ab") as metrics:
        metrics.write(b'{"step": 1, "loss": 2.0}\n')
    assert waits_for(folder) is None


def test_ten_seconds_count_from_the_launch_and_not_from_the_import_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "_POLL_S", 0.001)
    monkeypatch.setattr(waiting.time, "time", lambda: 1012.0)
    with print_waiting(tmp_path, 2, 1000.0):
        until = time.monotonic() + 60
        while not (said := capsys.readouterr().err) and time.monotonic() < until:
            time.sleep(0.001)
    assert said.startswith("12 s: waiting for 2 of 2 ranks")
