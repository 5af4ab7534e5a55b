"""Log folders whose files were swapped with those of another run: refused, or read as what they are."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from manifests.errors import UserError
from runner.commands import cli
from runner.rundir.records import (
    JobRecord,
    RunState,
    read_job_record,
    read_state,
    write_job_record,
    write_run_record,
    write_state,
)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs that have ended, after 3 and after 7 steps."""
    for name, step in (("a", 3), ("b", 7)):
        log = tmp_path / name
        (log / "heartbeat").mkdir(parents=True)
        write_run_record(log, {"id": name * 32, "name": name, "launches": []})
        write_job_record(log, JobRecord(
            scheduler="local", id="7", name=name, output=str(log / "rank-0.log"), host=socket.gethostname(), birth="-",
        ))  # fmt: skip
        (log / "rank-0.log").write_text(name)
        write_state(log, RunState(step=step, ended="done"))
        lines = [
            {"rank": 0, "stages": [0], "load_s": 1.0, "run": name * 32},
            {"step": step, "loss": 1.0 * step, "tokens_per_s": 1.0},
        ]
        (log / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def code_of(*words: object) -> str:
    """Return the error code of a command, "" if it succeeds."""
    ended = CliRunner().invoke(cli, [*map(str, words)])
    assert ended.exception is None or isinstance(ended.exception, UserError), ended.exception
    return ended.exception.code if isinstance(ended.exception, UserError) else ""


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("job.json", {"status", "logs", "cancel"}),
        ("run.json", {"status", "logs", "cancel", "report"}),
        ("metrics.jsonl", {"status", "report"}),
        ("state.json", set()),
    ],
)
def test_file_of_another_run_is_refused_by_each_verb_that_reads_it(runs: Path, name: str, refused: set[str]) -> None:
    shutil.copyfile(runs / "b" / name, runs / "a" / name)
    codes = {verb: code_of(verb, runs / "a") for verb in ("status", "logs", "cancel", "report")}
    assert codes == {verb: "log.other-run" if verb in refused else "" for verb in codes}


def test_end_of_another_run_is_not_this_runs(runs: Path) -> None:
    shutil.copyfile(runs / "b" / "state.json", runs / "a" / "state.json")
    assert read_state(runs / "a") is None
    ended = CliRunner().invoke(cli, ["status", str(runs / "a"), "--json"])
    assert (json.loads(ended.output)["state"], json.loads(ended.output)["last_step"]) == ("KILLED", 3)


def test_renamed_and_copied_log_folder_is_the_run_that_it_was(runs: Path) -> None:
    (runs / "a").rename(runs / "renamed")
    shutil.copytree(runs / "b", runs / "copied")
    for log, name, step in (("renamed", "a", 3), ("copied", "b", 7)):
        shown = json.loads(CliRunner().invoke(cli, ["status", str(runs / log), "--json"]).output)
        assert (shown["name"], shown["state"], shown["last_step"]) == (name, "COMPLETED", step)
        assert code_of("report", runs / log) == ""


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "report"])
def test_packed_folder_is_no_log_folder_of_any_verb(verb: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert code_of(verb, tmp_path) in ("launch.no-record", "log.unreadable")
    with pytest.raises(UserError):
        read_job_record(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", '"x"', "3"])
def test_state_that_is_no_object_is_no_state(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    assert read_state(tmp_path) is None
