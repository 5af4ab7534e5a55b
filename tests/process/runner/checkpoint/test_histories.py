"""What becomes of a folder of checkpoints, and of its run, when something in it is damaged, launched or in the way.

One rank trains; each run starts from scratch, from files.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from runner.checkpoint.history import checkpoint_path
from stores.open import open_manifest
from tests.builders import flip, pack, reshard
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import save_model
from tests.process.local_jobs import forked_runner
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said
from tests.process.torchrun import started

SLOW_DISK = """
import os
import time

from runner.train import main

replace = os.replace

def replace_later(source, target):
    time.sleep(2 if str(target).endswith("manifest.json") else 0)
    replace(source, target)

os.replace = replace_later
main()
"""
# Rows for one step; the second fails, or one of two ranks has rows without tokens.
ONE_STEP = """
class OneStep:
    def __init__(self, request):
        self.request = request

    def read(self, state):
        rows = self.request.num_rows * [{"input_ids": [1, 2]}]
        yield rows, 1
        if self.request.sources == ("fails",):
            raise KeyError("text")
        if self.request.num_ranks > 1:
            yield self.request.num_rows * [{}] if self.request.rank else rows, 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for 4 steps, saving after 2 and 4, and begin others with what that left."""
    place = tmp_path_factory.mktemp("histories")
    save_model(place / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=80)
    pack(place / "model", place / "packed", "pp=1")
    run_jobs(1, [saving(place, "whole", place / "packed", "--checkpoint-every", 2, steps=4)])
    shutil.copytree(place / "whole", place / "damaged")
    flip(checkpoint_path(place / "damaged", 4) / "stage-000/exp_avg/model.safetensors", -9, 4)
    shutil.copytree(checkpoint_path(place / "whole", 2), checkpoint_path(place / "launched", 2))
    shutil.copytree(place / "whole", place / "copied")
    shutil.copytree(checkpoint_path(place / "copied", 2), checkpoint_path(place / "copied", 10))
    shutil.copytree(checkpoint_path(place / "copied", 2), checkpoint_path(place / "copied", 6))
    (checkpoint_path(place / "copied", 6) / "manifest.json").unlink()  # not yet copied
    (place / "blocked").mkdir()
    for step in (1, 2):
        (place / "blocked" / f".step-{step:06d}.partial").touch()
    going_on = ("--resume", "auto", "--checkpoint-every", 2, "--keep", 1)
    jobs = [
        saving(place, "damaged", place / "packed", *going_on, "--save", place / "final", steps=8),
        saving(place, "launched", checkpoint_path(place / "launched", 2), *going_on, steps=8),
        saving(place, "copied", place / "packed", *going_on, steps=6),
        saving(place, "blocked", place / "packed", "--checkpoint-every", 1, "--checkpoint-sync", steps=2),
    ]
    run_jobs(1, jobs)
    return place


def saving(place: Path, name: str, root: Path, *args: object, steps: int) -> dict[str, object]:
    sizes = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 2)
    return job(root, place / f"{name}-log", *sizes, "--checkpoint", place / name, "--steps", steps, *args)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_attempt_that_was_passed_over_leaves_nothing_in_memory(place: Path) -> None:
    told = said(place / "damaged-log")
    assert f"warning: {checkpoint_path(place / 'damaged', 4)} cannot be resumed: " in told
    # The weights of the damaged one, whose moments cannot be read; then of the one before, and its moments.
    assert [line for line in told.splitlines() if "in memory" in line] == 2 * ["1 stages in memory"]


def test_trained_weights_are_saved_when_the_checkpoint_that_they_came_from_is_gone(place: Path) -> None:
    assert names_in(place / "damaged") == ["step-000004.set-aside-1", "step-000008"]
    parents = [Path(parent.location) for parent in open_manifest(place / "final").manifest.parents]
    assert parents == [place / "packed", checkpoint_path(place / "damaged", 2)]


def test_checkpoint_that_is_launched_stays_whatever_keep_says(place: Path) -> None:
    assert "error:" not in said(place / "launched-log")
    assert names_in(place / "launched") == ["step-000002", "step-000008"]


def test_copy_under_the_name_of_a_later_step_costs_no_progress(place: Path) -> None:
    copied = checkpoint_path(place / "copied", 10)
    assert f"warning: {copied}: its manifest says step 2" in said(place / "copied-log")
    assert [line["step"] for line in lines_of(place / "copied-log") if "loss" in line] == [5, 6]
    assert names_in(place / "copied") == ["step-000006", "step-000006.set-aside-1", "step-000010"]


def test_run_whose_last_save_fails_has_failed(place: Path) -> None:
    last = checkpoint_path(place / "blocked", 2)
    where = f"rank 0: {last}"
    assert f" at {where}\n" in said(place / "blocked-log")
    failed = {line["step"]: line["save_error"] for line in lines_of(place / "blocked-log") if "save_error" in line}
    assert list(failed) == [1, 2]
    assert failed[2].startswith(where)


# What fails after the last step does not lose what was trained: `--save` is written first.


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    source = folder / "source"
    save_model(source, num_hidden_layers=1, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **json.loads((source / "config.json").read_text()))
    return pack(source, folder / "packed", "pp=1")


def train(
    packed: Path, place: Path, *words: str | Path, script: str | Path = "../../runner/train.py"
) -> tuple[int | None, list[str]]:
    """Train one step and save the weights; return the exit code and the errors' codes."""
    fixed = ("--data", "synthetic", "--seq-len", "16", "--steps", "1", "--no-self-check", "--log-dir", place, "--save",
             place / "trained")  # fmt: skip
    with started(1, str(script), packed / "manifest.json", *fixed, *words) as (rank,):
        code, said = rank.wait(60), rank.said
    return code, codes_in(said)


def codes_in(said: str) -> list[str]:
    """Return the codes of the errors that were printed."""
    return re.findall(r"^error: .*\[([\w.-]+)\]$", said, re.MULTILINE)


def test_weights_are_saved_although_the_evaluation_fails(packed: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    write_documents(text, [[1, 2, 3]])
    text.write_text(text.read_text() + "\nno JSON\n")  # as a first line, it would be refused before the first step
    code, codes = train(packed, tmp_path, "--eval-data", text)
    assert (code, codes) == (3, ["data.not-json"])
    assert reshard("verify", tmp_path / "trained").code == 0


def write_damaged(file: Path) -> None:
    """Write a text whose first document alone can be read, and so is before the first step."""
    if file.suffix == ".jsonl":
        write_documents(file, [[1, 2, 3]])
        file.write_text(file.read_text() + "\nno JSON\n")
        return
    table = pyarrow.table({"text": [*64 * ["w1 w2"], "w3 w4"]})
    how: dict[str, Any] = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    parquet.write_table(table, file, row_group_size=64, **how)
    file.write_bytes(file.read_bytes().replace(b"w3 w4", b"w3 w5"))


@pytest.mark.parametrize(("name", "code"), [("a.jsonl", "data.not-json"), ("a.parquet", "data.not-parquet")])
def test_checkpoint_that_is_being_saved_is_finished_although_the_evaluation_fails(
    name: str, code: str, packed: Path, tmp_path: Path
) -> None:
    script, history = tmp_path / "slow.py", tmp_path / "history"
    write_damaged(tmp_path / name)
    script.write_text(SLOW_DISK)
    saving = ("--checkpoint", history, "--checkpoint-every", "1", "--eval-every", "1", "--steps", "2")
    ended = train(packed, tmp_path, "--eval-data", tmp_path / name, *saving, script=script)
    assert ended == (3, [code])
    assert reshard("verify", checkpoint_path(history, 1)).code == 0


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        ("ends", [(3, ["data.dataset"])]),
        ("fails", [(3, ["data.dataset"])]),
        ("differs", [(5, ["rank.lost"]), (3, ["data.bad-row"])]),
    ],
    ids=["all ranks", "code of a package", "one rank"],
)
def test_checkpoint_that_is_being_saved_is_finished_although_a_dataset_fails(
    source: str, ends: list[tuple[int, list[str]]], packed: Path, tmp_path: Path
) -> None:
    script, history, info = tmp_path / "slow.py", tmp_path / "history", tmp_path / "own-1.0.dist-info"
    script.write_text(SLOW_DISK)
    (tmp_path / "one_step.py").write_text(ONE_STEP)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[runner.data]\none-step = one_step:OneStep\n")
    data = ("--data", source, "--data-class", "one-step", "--seq-len", "16", "--dp-replicate", str(len(ends)))
    saving = ("--checkpoint", history, "--checkpoint-every", "1", "--steps", "2", "--log-dir", tmp_path / "log")
    with started(len(ends), str(script), packed / "manifest.json", *data, *saving, "--no-self-check") as ranks:
        codes = [rank.wait(60) for rank in ranks]
        assert [(code, codes_in(rank.said)) for code, rank in zip(codes, ranks, strict=True)] == ends
    assert reshard("verify", checkpoint_path(history, 1)).code == 0


@pytest.mark.parametrize("adapters", [(), ("--lora-rank", "2")])
def test_run_that_is_started_again_replaces_what_it_has_saved_and_nothing_else(
    adapters: tuple[str, ...], packed: Path, tmp_path: Path
) -> None:
    text, trained, history = tmp_path / "text.jsonl", tmp_path / "trained", tmp_path / "history"
    own = ("--log-dir", tmp_path / "log", "--save", trained, "--checkpoint", history, "--resume", "auto")
    sizes = ("--data", "synthetic", "--seq-len", "16", "--steps", "1", "--no-self-check", *adapters)
    write_documents(text, [[1, 2, 3]])
    whole = text.read_text()
    text.write_text(whole + "\nno JSON\n")
    ends = []
    for change in (lambda: None, lambda: text.write_text(whole), (trained / "notes").touch):
        change()
        run = forked_runner("launch", packed, "--", *sizes, *own, "--eval-data", text)
        ends.append((run.returncode, re.findall(r"^error: .*\[([\w.-]+)\]$", run.stderr, re.MULTILINE)))
    assert ends == [(3, ["data.not-json"]), (0, []), (3, ["output.exists"])]
    assert adapters or reshard("verify", trained).code == 0


def test_weights_are_saved_and_evaluated_although_the_last_checkpoint_fails(packed: Path, tmp_path: Path) -> None:
    taken = tmp_path / "history" / ".step-000001.partial"
    taken.parent.mkdir(parents=True)
    taken.write_text("of somebody else")
    text = tmp_path / "text.jsonl"
    write_documents(text, [[1, 2, 3]])
    code, codes = train(packed, tmp_path, "--checkpoint", tmp_path / "history", "--eval-data", text)
    assert code == 3
    assert codes
    assert set(codes) == {"output.unwritable"}
    assert taken.read_text() == "of somebody else"
    assert reshard("verify", tmp_path / "trained").code == 0
    assert ["eval_loss" in line for line in lines_of(tmp_path)].count(True) == 1


def test_evaluation_data_that_is_not_there_ends_the_run_before_its_first_step(packed: Path, tmp_path: Path) -> None:
    code, codes = train(packed, tmp_path, "--eval-data", tmp_path / "gone.jsonl")
    assert (code, codes) == (3, ["data.no-files"])
    assert not (tmp_path / "metrics.jsonl").exists()
