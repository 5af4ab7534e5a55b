"""What fails after the last step does not lose what was trained: `--save` is written first."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.builders import pack, reshard
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import save_model
from tests.process.runner.training_jobs import lines_of
from tests.process.torchrun import started


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    source = folder / "source"
    save_model(source, num_hidden_layers=1, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **json.loads((source / "config.json").read_text()))
    return pack(source, folder / "packed", "pp=1")


def train(packed: Path, place: Path, *words: str | Path) -> tuple[int | None, list[str]]:
    """Train one step and save the weights; return the exit code and the errors' codes."""
    fixed = ("--data", "synthetic", "--seq-len", "16", "--steps", "1", "--log-dir", place, "--save", place / "trained")
    with started(1, "../../runner/train.py", packed / "manifest.json", *fixed, *words) as (rank,):
        code, said = rank.wait(60), rank.said
    return code, re.findall(r"^error: .*\[([\w.-]+)\]$", said, re.MULTILINE)


def test_weights_are_saved_although_the_evaluation_fails(packed: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    write_documents(text, [[1, 2, 3]])
    text.write_text(text.read_text() + "\nno JSON\n")  # as a first line, it would be refused before the first step
    code, codes = train(packed, tmp_path, "--eval-data", text)
    assert (code, codes) == (3, ["data.not-json"])
    assert reshard("verify", tmp_path / "trained").code == 0


def test_weights_are_saved_and_evaluated_although_the_last_checkpoint_fails(packed: Path, tmp_path: Path) -> None:
    taken = tmp_path / "history" / "step-000001" / "model-00001-of-00001.safetensors"
    taken.parent.mkdir(parents=True)
    taken.write_text("of somebody else")
    text = tmp_path / "text.jsonl"
    write_documents(text, [[1, 2, 3]])
    code, codes = train(packed, tmp_path, "--checkpoint", tmp_path / "history", "--eval-data", text)
    assert code == 3
    assert codes
    assert set(codes) == {"output.not-ours"}
    assert taken.read_text() == "of somebody else"
    assert reshard("verify", tmp_path / "trained").code == 0
    assert ["eval_loss" in line for line in lines_of(tmp_path)].count(True) == 1


def test_evaluation_data_that_is_not_there_ends_the_run_before_its_first_step(packed: Path, tmp_path: Path) -> None:
    code, codes = train(packed, tmp_path, "--eval-data", tmp_path / "gone.jsonl")
    assert (code, codes) == (3, ["data.no-files"])
    assert not (tmp_path / "metrics.jsonl").exists()
