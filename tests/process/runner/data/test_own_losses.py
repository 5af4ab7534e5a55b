"""Losses and datasets of another package, and built-in losses: loss, gradients and weights as of one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from runner.data.rows import IGNORED
from tests.builders import pack
from tests.fast.runner.data.words import BOS, EOS, VOCAB_SIZE, text_of, write_tokenizer
from tests.fast.runner.tiny import load_model, read_config, save_model
from tests.process.local_jobs import ROOT
from tests.process.runner.data.test_own_rows import (
    BATCH,
    FLAGS,
    SEQ_LEN,
    batch_of,
    check_step,
    first_line,
    prepare,
    run_all,
    weights_in,
    write_rows,
)
from tests.process.runner.training_jobs import job, lines_of, losses_of, run_jobs, said
from tests.process.torchrun import launch

EXAMPLES = ROOT / "examples"
ENTRY_POINTS = """\
[runner.losses]
preference = preference_loss:preference
careless = careless_loss:careless
[runner.data]
lines = streaming_dataset:Lines
"""
# It is not a sum over tokens, and does not say so.
CARELESS = """\
import torch


def careless(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).sum(1).square().sum(), len(labels)
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Install the examples as a package does, in a folder that ranks import from."""
    folder = tmp_path / "packages"
    info = folder / "examples-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: examples\nVersion: 1.0\n")
    for name in ("preference_loss.py", "streaming_dataset.py"):
        (folder / name).write_text((EXAMPLES / name).read_text())
    (folder / "careless_loss.py").write_text(CARELESS)
    return folder


def weighted(logits: torch.Tensor, labels: torch.Tensor, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Return the mean over weights of cross-entropy with smoothed labels, and of 0.01 of the squared log-sum-exp."""
    total, weight = torch.zeros(()), 0.0
    for row, record in enumerate(rows):
        for place in range(1, len(record["input_ids"])):
            if labels[row, place] != IGNORED:
                at = logits[row, place - 1]
                loss = cross_entropy(at, labels[row, place], label_smoothing=0.1) + 0.01 * at.logsumexp(-1) ** 2
                total = total + record["weight"][place] * loss
                weight += record["weight"][place]
    return total / weight


def preferred(logits: torch.Tensor, labels: torch.Tensor, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Return the mean of DPO's loss over the pairs of rows, of those that have anything to say."""
    scores = []
    for row, record in enumerate(rows):
        places = [place for place in range(1, SEQ_LEN) if labels[row, place] != IGNORED]
        known = [logits[row, place - 1].log_softmax(-1)[labels[row, place]] for place in places]
        scores.append(sum(known, torch.zeros(())) - record["reference"])
    pairs = [(scores[row], scores[row + 1]) for row in range(0, len(rows), 2) if (labels[row, 1:] != IGNORED).any()]
    return torch.stack([-logsigmoid(0.1 * (chosen - rejected)) for chosen, rejected in pairs]).mean()


BUILT_IN = ("--label-smoothing", 0.1, "--z-loss", 0.01, "--token-weights", "weight")


@pytest.mark.parametrize(
    "names", [("pp2", "dp2", "cp2"), pytest.param(("pp1", "pp3", "pp4"), marks=pytest.mark.slow)], ids="-".join
)
def test_smoothing_z_loss_and_weights_train_as_in_one_process(tmp_path: Path, names: tuple[str, ...]) -> None:
    source, rows = prepare(tmp_path, names), write_rows(tmp_path / "rows.jsonl")
    run_all(tmp_path, names, ("--data", tmp_path / "rows.jsonl", *BUILT_IN))
    for name in names:
        line = first_line(tmp_path / f"log-{name}")
        check_step(source, tmp_path / f"saved-{name}", rows, line, weighted)


@pytest.mark.parametrize(
    "names", [("pp2", "dp2"), pytest.param(("pp1", "pp3", "pp4"), marks=pytest.mark.slow)], ids="-".join
)
def test_preferences_train_and_evaluate_as_in_one_process(
    tmp_path: Path, packages: Path, names: tuple[str, ...]
) -> None:
    source, rows = prepare(tmp_path, names), write_rows(tmp_path / "rows.jsonl")
    data = ("--data", tmp_path / "rows.jsonl", "--loss", "preference", "--eval-data", tmp_path / "held.jsonl")
    held = rows[3:13]  # of which one, the second of its pair, has no labels
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, held)))
    run_all(tmp_path, names, (*data, "--self-check"), packages)
    for name in names:
        line = first_line(tmp_path / f"log-{name}")
        check_step(source, tmp_path / f"saved-{name}", rows, line, preferred)
        assert " --loss as one process trains it" in said(tmp_path / f"log-{name}")
        with torch.no_grad():
            tokens, labels = batch_of(held)
            loss = preferred(load_model(tmp_path / f"saved-{name}")(input_ids=tokens).logits, labels, held).item()
        evaluated = next(line for line in lines_of(tmp_path / f"log-{name}") if "eval_loss" in line)
        assert evaluated["eval_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_pairs_are_evaluated_together_where_frequencies_depend_on_the_length_of_a_row(
    tmp_path: Path, packages: Path
) -> None:
    prepare(tmp_path, ("pp1",), rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=4)
    rows = write_rows(tmp_path / "rows.jsonl")
    data = ("--data", tmp_path / "rows.jsonl", "--eval-data", tmp_path / "rows.jsonl")
    run_all(tmp_path, ("pp1",), (*data, "--loss", "preference"), packages)
    with torch.no_grad():
        tokens, labels = batch_of(rows)
        loss = preferred(load_model(tmp_path / "saved-pp1")(input_ids=tokens).logits, labels, rows).item()
    evaluated = next(line for line in lines_of(tmp_path / "log-pp1") if "eval_loss" in line)
    assert evaluated["eval_loss"] == pytest.approx(loss, rel=1e-6)


def test_losses_are_refused_where_rows_are_split_or_have_no_fields(tmp_path: Path, packages: Path) -> None:
    prepare(tmp_path, ("dp2",))
    write_rows(tmp_path / "rows.jsonl")
    data = ("--data", tmp_path / "rows.jsonl", *FLAGS[:-3], "--steps", 1)
    cases = {
        "split": ("--tokenized", "--loss", "preference", "--cp", 2),
        "text": ("--loss", "preference", "--dp-replicate", 2),
        "none": ("--tokenized", "--loss", "other", "--dp-replicate", 2),
        "careless": ("--tokenized", "--loss", "careless", "--cp", 2),
    }
    run_jobs(2, [job(tmp_path / "pp=1", tmp_path / name, *data, *flags, path=str(packages))
                 for name, flags in cases.items()])  # fmt: skip
    codes = {"split": "options.loss", "text": "options.loss", "none": "options.no-entry-point",
             "careless": "model.no-context-parallelism"}  # fmt: skip
    assert {name: code for name, code in codes.items() if f"error: {code}" not in said(tmp_path / name)} == {}


def test_streamed_lines_train_as_their_rows_do_and_resume_on_other_ranks(tmp_path: Path, packages: Path) -> None:
    source = tmp_path / "source"
    save_model(source, num_hidden_layers=2, vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(source, **read_config(source))
    pack(source, tmp_path / "packed", "pp=1")
    texts = [[(number + place) % 8 for place in range(1 + 5 * number % 13)] for number in range(20)]
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(map(text_of, texts)))
    rows = [{"input_ids": [BOS, *(2 + word for word in text)]} for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ("--seq-len", SEQ_LEN, "--global-batch", BATCH, "--lr", 1e-2, "--steps", 4)
    streamed = (*flags, "--data-class", "lines", "--data", lines.as_uri())
    saving = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", 2)
    of_step_2, two = ("--resume", tmp_path / "saved" / "step-000002"), ("--dp-replicate", 2)
    logs = {name: tmp_path / name for name in ("rows", "streamed", "resumed", "one")}

    def job_of(name: str, *args: object) -> dict[str, Any]:
        saved = ("--save", tmp_path / f"{name}-weights")
        return job(tmp_path / "packed", logs[name], *args, *saved, path=str(packages))

    jobs = [
        job_of("rows", *flags, "--data", tmp_path / "rows.jsonl", "--tokenized", *two),
        job_of("streamed", *streamed, *saving, *two),
        job_of("resumed", *streamed, *of_step_2, *two),
    ]
    run_jobs(2, jobs)
    run_jobs(1, [job_of("one", *streamed, *of_step_2)])
    assert losses_of(logs["streamed"]) == losses_of(logs["rows"])
    assert losses_of(logs["resumed"]) == losses_of(logs["streamed"])[2:]
    assert losses_of(logs["one"]) == pytest.approx(losses_of(logs["streamed"])[2:], rel=1e-6)
    weights = {name: weights_in(tmp_path / f"{name}-weights") for name in ("rows", "streamed", "resumed")}
    assert weights["rows"] == weights["streamed"] == weights["resumed"]


def test_conversations_become_rows_whose_answers_count(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    template = (
        "{{ bos_token + ' ' }}"
        "{% for message in messages %}"
        "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
        "{{ message.role + ' ' + message.content + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)  # as transformers saves it
    bos = {"__type": "AddedToken", "content": "<bos>", "special": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    turns = [("user", "w0 w1"), ("assistant", "w2"), ("user", "w3"), ("assistant", "w4 w5")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    launch(1, "../../examples/chat_rows.py", tmp_path, tmp_path / "talks.jsonl", tmp_path / "rows.jsonl")
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    # Roles are unknown words, which are EOS, too.
    assert row["input_ids"] == [BOS, EOS, 2, 3, EOS, EOS, 4, EOS, EOS, 5, EOS, EOS, 6, 7, EOS]
    assert row["loss_mask"] == [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]
