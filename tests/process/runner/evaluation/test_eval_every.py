"""Evaluations between steps: their losses, and that training is the same without them."""

from __future__ import annotations

from pathlib import Path

from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, write_documents, write_tokenizer
from tests.fast.runner.tiny import read_config, save_model
from tests.process.runner.training_jobs import job, lines_of, losses_of, run_jobs


def evaluations_of(log_dir: Path) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in lines_of(log_dir) if "eval_loss" in line}


def test_evaluations_between_steps_are_those_after_them_and_change_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source, num_hidden_layers=2, hidden_size=32, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **read_config(source))
    pack(source, tmp_path / "packed", "pp=2")
    documents = [[(number + place) % 8 for place in range(1 + 5 * number % 17)] for number in range(30)]
    data = ("--data", write_documents(tmp_path / "text.jsonl", documents))
    held = ("--eval-data", write_documents(tmp_path / "held.jsonl", documents[:7]))
    flags = (*data, *held, "--seq-len", 16, "--global-batch", 4, "--lr", 1e-2)
    logs = {name: tmp_path / name for name in ("every", "two", "four", "five")}
    run_jobs(
        2,
        [
            job(tmp_path / "packed", logs["every"], *flags, "--steps", 5, "--eval-every", 2),
            job(tmp_path / "packed", logs["two"], *flags, "--steps", 2),
            job(tmp_path / "packed", logs["four"], *flags, "--steps", 4),
            job(tmp_path / "packed", logs["five"], *flags, "--steps", 5),
        ],
    )
    assert losses_of(logs["every"]) == losses_of(logs["five"])
    expected = {step: loss for name in ("two", "four", "five") for step, loss in evaluations_of(logs[name]).items()}
    assert evaluations_of(logs["every"]) == expected
    assert list(expected) == [2, 4, 5]
