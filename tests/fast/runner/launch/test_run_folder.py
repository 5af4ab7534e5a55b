"""Each run has its own folder: chosen by default, emptied of other runs where one is named, kept by a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runner.commands import cli
from runner.config.flags import TrainOptions, parse_training
from runner.launch.run_folder import RunFolder, choose_folder
from runner.report.read import read_run
from runner.rundir.records import JobRecord, config_of, find_run, note_resolved, read_run_record, run_id
from tests.builders import llama_config, pack, write_model

PARTS = {key: [0.25] for key in ("data_s", "compute_s", "communication_s", "bubble_s")}
STEP = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "num_tokens": 1, "step_s": 1.0, "tokens_per_s": 1.0, **PARTS}
LOAD = {"rank": 0, "stages": [0], "load_nbytes": 1, "load_s": 1.0, "base_nbytes": 1}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(*words: str) -> TrainOptions:
    return parse_training(("--data", "synthetic", *words))


def begin(path: Path, *words: str, is_chosen: bool = False) -> dict[str, Any]:
    asked = options(*words)
    path.mkdir(parents=True, exist_ok=True)
    run = RunFolder(path=path, name="tiny", manifest="/m", digest="d", options=asked, is_chosen=is_chosen)
    run.begin()
    if is_chosen:
        run.record(JobRecord(scheduler="slurm", id="7", name="tiny", output=""))
    found: dict[str, Any] = json.loads((path / "run.json").read_text())
    return found


def launch(*words: str) -> Path:
    """Begin a run in the folder that is chosen for it."""
    path = choose_folder(options(*words), "tiny")
    begin(path, *words, is_chosen=True)
    return path


def leave(log: Path, first: int, last: int, *, trace: str | None = None) -> None:
    """Leave the metrics of some steps, and a trace of the last one under a run's name."""
    lines = [LOAD, *({"step": step, **STEP} for step in range(first, last + 1))]
    with open(log / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    if trace is not None:
        shape = {"schedule": "1F1B", "num_stages": 1, "num_ranks": 1, "style": "loop", "num_microbatches": 1}
        event = {"name": "F0", "ph": "X", "pid": 0, "tid": 0, "ts": 1.0, "dur": 1.0}
        event |= {"args": {"step": last, "kind": "F", "microbatch": 0}}  # type: ignore[dict-item]
        (log / "trace").mkdir(exist_ok=True)
        document = {"traceEvents": [event], "run": {**shape, "run": trace}}
        (log / "trace" / "rank-00000.json").write_text(json.dumps(document))


def save(history: Path, step: int) -> None:
    (history / f"step-{step:06d}").mkdir(parents=True)
    (history / f"step-{step:06d}" / "manifest.json").write_text("{}")


def test_each_run_without_a_named_folder_has_one_of_its_own_and_the_latest_is_found(place: Path) -> None:
    first, second = launch(), launch()
    assert first.parent == second.parent == Path("runner-log")
    assert first != second
    assert find_run(Path("runner-log")).resolve() == second.resolve()
    assert find_run(first) == first


def test_verbs_take_the_latest_run_where_none_is_named(place: Path) -> None:
    leave(launch(), 1, 2)
    leave(launch(), 1, 3)
    done = CliRunner().invoke(cli, ["report", "--out", "page.html"])
    assert done.exception is None, done.exception
    assert "3 steps" in done.output


def test_named_folder_keeps_what_an_earlier_run_left_apart(place: Path) -> None:
    earlier = begin(place / "log")
    leave(place / "log", 1, 40, trace=earlier["id"])
    (place / "log" / "profile").mkdir()
    (place / "log" / "times.json").write_text("{}")  # or the later run would be planned with times of this one
    (place / "log" / "mine.txt").write_text("mine")
    later = begin(place / "log")
    leave(place / "log", 1, 3)
    run = read_run(place / "log")
    assert ([step["step"] for step in run.steps], run.traces) == ([1, 2, 3], None)
    assert later["id"] != earlier["id"]
    (aside,) = (place / "log" / "earlier").iterdir()
    assert run_id(aside) == earlier["id"]
    assert len(read_run(aside).steps) == 40
    assert read_run(aside).traces is not None
    assert (aside / "profile").exists()
    assert [path.name for path in place.rglob("times.json")] == ["times.json"]
    assert (aside / "times.json").exists()
    assert (place / "log" / "mine.txt").exists()


def test_resume_of_its_own_checkpoints_is_the_same_run_in_the_same_folder(place: Path) -> None:
    words = ("--checkpoint", "history", "--resume", "auto")
    first = launch(*words)
    other = launch("--checkpoint", "elsewhere", "--resume", "auto")
    assert launch(*words) not in (first, other)  # nothing was saved: it begins anew
    save(place / "elsewhere", 3)
    leave(other, 1, 3)
    again = launch("--checkpoint", "elsewhere", "--resume", "auto")
    assert again == other
    leave(again, 4, 6)
    assert [step["step"] for step in read_run(other).steps] == [1, 2, 3, 4, 5, 6]
    launches = json.loads((other / "run.json").read_text())["launches"]
    assert len(launches) == 2


@pytest.mark.parametrize(
    ("words", "is_same"),
    [
        (("--resume", "step-3", "--checkpoint", "history"), True),
        (("--resume", "history/step-000003", "--checkpoint", "history"), True),
        (("--resume", "history/step-000003"), True),
        (("--resume", "auto", "--checkpoint", "other"), False),
        (("--resume", "history/step-000003", "--checkpoint", "other"), False),
        (("--resume", "history/step-000003", "--resume-weights-only"), False),
        (("--resume", "other/step-000003"), False),
        (("--checkpoint", "history"), False),
    ],
)
def test_named_folder_goes_on_only_with_its_own_checkpoints(place: Path, words: tuple[str, ...], is_same: bool) -> None:
    first = begin(place / "log", "--checkpoint", "history")
    save(place / "history", 3)
    leave(place / "log", 1, 3)
    assert (begin(place / "log", *words)["id"] == first["id"]) == is_same
    assert (place / "log" / "metrics.jsonl").exists() == is_same


def test_folder_whose_run_has_no_record_is_of_another_run(place: Path) -> None:
    begin(place / "log", "--checkpoint", "history")
    save(place / "history", 3)
    leave(place / "log", 1, 3)
    (place / "log" / "run.json").unlink()
    begin(place / "log", "--checkpoint", "history", "--resume", "auto")
    assert not (place / "log" / "metrics.jsonl").exists()
    assert len(list((place / "log" / "earlier").iterdir())) == 1


@pytest.mark.parametrize("began", ["1e300", "-1e300", "1" + "0" * 400, "NaN", "Infinity"])
def test_run_that_began_at_no_date_is_moved_aside_by_the_dates_of_its_files(place: Path, began: str) -> None:
    (place / "log").mkdir()
    (place / "log" / "run.json").write_text(f'{{"id": "theirs", "name": "x", "began": {began}}}')
    begin(place / "log")
    (aside,) = (place / "log" / "earlier").iterdir()
    assert (run_id(aside), aside.name[:2]) == ("theirs", "20")


def test_trace_of_another_run_is_not_reported(place: Path) -> None:
    begin(place / "log")
    leave(place / "log", 1, 3, trace="of another run")
    assert read_run(place / "log").traces is None
    leave(place / "log", 4, 5, trace=run_id(place / "log"))
    assert read_run(place / "log").traces is not None


def test_record_says_what_was_launched_and_what_became_of_it(place: Path) -> None:
    run = begin(place / "log", "--lr", "0.5", "--checkpoint", "history")
    (launched,) = run["launches"]
    assert (launched["options"]["lr"], launched["manifest"]) == (0.5, {"path": "/m", "digest": "d"})
    assert {"python", "torch"} <= set(launched["versions"])
    assert run["checkpoint"] == str(place / "history")
    note_resolved(place / "log", {"lr": 0.25, "num_ranks": 4})
    config = config_of(read_run_record(place / "log"))
    assert (config["lr"], config["num_ranks"], config["manifest_digest"]) == (0.25, 4, "d")
    assert config["version/torch"] == launched["versions"]["torch"]


def test_record_has_no_value_that_env_passes_to_the_ranks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    words = ["runner", "launch", "--env", "A=secret", "--env=B=secret", "--env", "HF_TOKEN", "--name", "x=y"]
    monkeypatch.setattr(sys, "argv", words)
    (launched,) = begin(place / "log")["launches"]
    assert launched["argv"] == ["runner", "launch", "--env", "A=***", "--env=B=***", *words[5:]]
    assert "secret" not in (place / "log" / "run.json").read_text()


def test_launch_without_a_folder_hands_the_chosen_one_to_the_ranks(place: Path) -> None:
    write_model(place / "source", llama_config())
    pack(place / "source", place / "packed")
    done = CliRunner().invoke(cli, ["launch", str(place / "packed"), "--dry-run", "--", "--data", "synthetic"])
    assert done.exception is None, done.exception
    words = done.stdout.split()
    assert words[words.index("--log-dir") + 1].startswith("runner-log/")
    assert words[words.index("--log-dir") + 1].endswith("-packed")
    assert not (place / "runner-log").exists()
