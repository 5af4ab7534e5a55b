"""Rows of token ids on stages, replicas and parts of rows: loss, gradients and weights as of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from manifests.digest import digest_bytes
from runner.data.rows import IGNORED
from tests.builders import pack
from tests.fast.runner.tiny import SIZES, load_model, save_model
from tests.process.runner.training_jobs import job, lines_of, run_jobs

SEQ_LEN, BATCH = 16, 8
# One step of AdamW whose epsilon exceeds every gradient: a weight changes by -gradient / (1 + |gradient| / 1e3).
STEP = ("--lr", 1e3, "--eps", 1e3, "--weight-decay", 0, "--max-norm", 0, "--beta1", 0, "--beta2", 0)
FLAGS = ("--seq-len", SEQ_LEN, "--global-batch", BATCH, "--microbatch", 2, "--tokenized", "--log-every", 100)
LAYOUTS: Mapping[str, tuple[int, str, tuple[object, ...]]] = {
    "pp1": (1, "pp=1", ()),
    "pp2": (2, "pp=2", ()),
    "pp3": (3, "pp=3", ()),
    "pp4": (4, "pp=4", ()),
    "dp2": (2, "pp=1", ("--dp-replicate", 2)),
    "cp2": (2, "pp=1", ("--cp", 2)),
}
Loss = Callable[[torch.Tensor, torch.Tensor, Sequence[Mapping[str, Any]]], torch.Tensor]


def write_rows(file: Path, *, count: int = 3 * BATCH) -> list[dict[str, Any]]:
    """Write rows of which no two have as many tokens that count, and one has none."""
    drawn, rows = Random(0), []
    for number in range(count):
        length = 1 + number % BATCH if number % BATCH < 3 else drawn.randint(4, SEQ_LEN)
        ids = [drawn.randrange(SIZES["vocab_size"]) for _ in range(length)]
        mask = [int(place >= length // 3) for place in range(length)]
        score = drawn.random()
        weights = [drawn.random() for _ in ids]
        rows.append({"input_ids": ids, "loss_mask": mask, "weight": weights, "reference": score - 3 * length})
    file.write_text("\n".join(map(json.dumps, rows)))
    return rows


def batch_of(rows: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded tokens, and labels as transformers takes them."""
    tokens, labels = torch.zeros((len(rows), SEQ_LEN), dtype=torch.long), torch.full((len(rows), SEQ_LEN), IGNORED)
    for row, record in enumerate(rows):
        ids, mask = torch.tensor(record["input_ids"]), torch.tensor(record["loss_mask"])
        tokens[row, : len(ids)], labels[row, : len(ids)] = ids, torch.where(mask.bool(), ids, IGNORED)
    return tokens, labels


def check_step(source: Path, saved: Path, rows: Sequence[Mapping[str, Any]], line: Mapping[str, Any],
               loss_of: Loss | None = None) -> None:  # fmt: skip
    """Compare a run's first step with transformers': the loss, and every gradient by what it changes."""
    model, after = load_model(source), load_model(saved)
    tokens, labels = batch_of(rows[:BATCH])
    if loss_of is None:
        loss = model(input_ids=tokens, labels=labels).loss
    else:
        loss = loss_of(model(input_ids=tokens).logits, labels, rows[:BATCH])
    loss.backward()
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for (name, before), changed in zip(model.named_parameters(), after.parameters(), strict=True):
        gradient, change = before.grad, (before - changed).detach()
        assert gradient is not None
        expected = gradient / (1 + gradient.abs() / 1e3)
        assert (change - expected).abs().max() <= 1e-6 + 2e-6 * expected.abs().max(), name


def prepare(place: Path, layouts: Sequence[str], **fields: Any) -> Path:
    source = place / "source"
    save_model(source, num_hidden_layers=4, hidden_size=32, intermediate_size=48, **fields)
    for layout in {LAYOUTS[name][1] for name in layouts}:
        pack(source, place / layout, layout)
    return source


def run_all(place: Path, names: Sequence[str], flags: Sequence[object], path: Path | None = None) -> None:
    """Take one step on each of these layouts, as many as there can be in one launch."""
    more = {} if path is None else {"path": str(path)}
    for num_ranks in sorted({LAYOUTS[name][0] for name in names}):
        jobs = [
            job(
                place / LAYOUTS[name][1],
                place / f"log-{name}",
                *FLAGS,
                *STEP,
                *LAYOUTS[name][2],
                *flags,
                "--steps",
                1,
                "--save",
                place / f"saved-{name}",
                **more,
            )
            for name in names
            if LAYOUTS[name][0] == num_ranks
        ]
        for described in jobs if "--self-check" in flags else ():
            described["args"] = [arg for arg in described["args"] if arg != "--no-self-check"]
        run_jobs(num_ranks, jobs)


def first_line(log: Path) -> dict[str, Any]:
    return next(line for line in lines_of(log) if "loss" in line)


@pytest.mark.parametrize(
    "names", [("pp2", "dp2", "cp2"), pytest.param(("pp1", "pp3", "pp4"), marks=pytest.mark.slow)], ids="-".join
)
def test_rows_train_as_in_one_process(tmp_path: Path, names: tuple[str, ...]) -> None:
    source, rows = prepare(tmp_path, names), write_rows(tmp_path / "rows.jsonl")
    run_all(tmp_path, names, ("--data", tmp_path / "rows.jsonl"))
    for name in names:
        line = first_line(tmp_path / f"log-{name}")
        assert line["num_tokens"] == sum(sum(row["loss_mask"][1:]) for row in rows[:BATCH])
        check_step(source, tmp_path / f"saved-{name}", rows, line)


def weights_in(folder: Path) -> dict[str, str]:
    return {file.name: digest_bytes(file.read_bytes()) for file in folder.rglob("*.safetensors")}


def test_rows_resume_where_they_were(tmp_path: Path) -> None:
    prepare(tmp_path, ("pp2",))
    write_rows(tmp_path / "rows.jsonl")
    data = (*FLAGS, "--data", tmp_path / "rows.jsonl", "--shuffle", "--lr", 1e-2)
    saving = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", 3)
    of_step_3 = ("--resume", tmp_path / "saved" / "step-000003")
    jobs = [
        job(tmp_path / "pp=2", tmp_path / "straight", *data, "--steps", 5, *saving, "--save", tmp_path / "a"),
        job(tmp_path / "pp=2", tmp_path / "resumed", *data, "--steps", 5, *of_step_3, "--save", tmp_path / "b"),
    ]
    run_jobs(2, jobs)
    assert weights_in(tmp_path / "a") == weights_in(tmp_path / "b")
