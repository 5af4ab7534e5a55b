"""Decoders on transformers' model classes: packed, trained on 1, 2 and 4 ranks, saved and exported, against them.

The reference is the model that transformers loads, whole, accumulating the same microbatches in the same order.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from runner.batches import Batch
from tests.builders import reshard
from tests.fast.runner.decoders import name_as_openai_did, save_decoder, tied_name
from tests.process.torchrun import launch
from tests.process.transformers_cases import (
    LR,
    MICROBATCH,
    NUM_RANKS,
    SLOW,
    SPANNING,
    STEPS,
    Case,
    batch_of,
    evaluated_batch,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step, by the names in files
    loss_after: float = math.nan


def run_cases(place: Path, which: str, cases: tuple[Case, ...], timeout_s: int) -> Path:
    for case in cases:
        source = case.folder(place, "source")
        save_decoder(source, case.model, **case.changes)
        if case.is_openai:
            name_as_openai_did(source)
        packed = reshard("pack", source, "--layout", case.layout, "--pp", str(case.num_ranks // case.num_shards),
                         "--out", case.folder(place, "packed"), "--quiet")  # fmt: skip
        assert packed.code == 0, packed.err
    for num_ranks in sorted({case.num_ranks for case in cases}):
        launch(num_ranks, "transformers_worker.py", place, which, timeout_s=timeout_s)
    return place


@pytest.fixture(scope="module")
def spanning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("spanning"), "spanning", SPANNING, 150)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("slow"), "slow", SLOW, 800)


def read_run(place: Path, case: Case) -> Run:
    """Put the ranks' parts together; every rank must tell of the same losses and norms."""
    ranks = [torch.load(case.folder(place, f"rank{rank}.pt")) for rank in range(case.num_ranks)]
    run = Run(losses=ranks[0]["losses"], norms=ranks[0]["norms"], loss_after=ranks[0]["loss after"])
    for rank in ranks:
        assert (rank["losses"], rank["norms"], rank["loss after"]) == (run.losses, run.norms, run.loss_after)
        for fqn, shape, offset, box in rank["gradients"]:
            whole = run.gradients.setdefault(fqn, torch.full(shape, torch.nan))
            whole[tuple(slice(at, at + size) for at, size in zip(offset, box.shape, strict=True))] = box
    return run


def load(folder: Path) -> Any:
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)


def summed_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train_transformers(source: Path) -> Run:
    model, run = load(source).train(), Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(STEPS):
        batch = batch_of(step)
        optimizer.zero_grad()
        losses = []
        for tokens, labels in microbatches(batch):
            loss = summed_loss(model, tokens, labels) / batch.num_tokens
            torch.autograd.backward(loss)
            losses.append(loss.item())
        run.losses.append(math.fsum(losses))
        squares = [parameter.grad.double().square().sum().item() for parameter in model.parameters()]
        run.norms.append(math.sqrt(math.fsum(squares)))
        if step == 0:
            run.gradients = gradients_in_files(model, source)
        optimizer.step()
    return run


def microbatches(batch: Batch) -> Any:
    return zip(torch.split(batch.tokens, MICROBATCH), torch.split(batch.labels, MICROBATCH), strict=True)


def gradients_in_files(model: Any, source: Path) -> dict[str, torch.Tensor]:
    """Give gradients as transformers saves weights: experts apart, under the names of files."""
    copy = load(source)
    with torch.no_grad():
        for parameter, like in zip(copy.parameters(), model.parameters(), strict=True):
            parameter.copy_(like.grad)
    copy.save_pretrained(source.parent / "gradients")
    return load_file(source.parent / "gradients" / "model.safetensors")


def check_training(place: Path, case: Case) -> None:
    found, expected = read_run(place, case), train_transformers(case.folder(place, "source"))
    owner = tied_name(expected.gradients)
    assert found.gradients.keys() - ({"lm_head.weight"} if case.is_tied else set()) == expected.gradients.keys()
    for fqn, gradient in found.gradients.items():
        other = expected.gradients[owner if case.is_tied and fqn == "lm_head.weight" else fqn]
        if case.is_bitwise:
            assert torch.equal(gradient, other), fqn
        else:  # added up in another order
            assert (gradient - other).norm() <= 1e-6 * other.norm(), fqn
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-12)
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-12 if case.is_bitwise else 1e-6)
    # Adam makes much of little: where gradients differ in their last bits, so do later steps, more.
    assert found.losses == pytest.approx(expected.losses, rel=1e-12 if case.is_bitwise else 1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=1e-12 if case.is_bitwise else 1e-3)


def check_export(place: Path, case: Case) -> None:
    exported = case.folder(place, "exported")
    ended = reshard("export", case.folder(place, "trained"), "--to", "hf", "--out", exported, "--quiet")
    assert ended.code == 0, ended.err
    before, after = (loss_on_evaluated(folder) for folder in (case.folder(place, "source"), exported))
    found = read_run(place, case).loss_after
    assert found == pytest.approx(after, rel=1e-5)
    assert found != pytest.approx(before, rel=1e-4)


@torch.no_grad()
def loss_on_evaluated(folder: Path) -> float:
    batch = evaluated_batch()
    return summed_loss(load(folder).eval(), batch.tokens, batch.labels).item() / batch.num_tokens


@pytest.mark.parametrize("case", SPANNING, ids=lambda case: case.name)
def test_gradients_losses_and_norms_are_those_of_transformers(case: Case, spanning: Path) -> None:
    check_training(spanning, case)


@pytest.mark.parametrize("case", SPANNING, ids=lambda case: case.name)
def test_export_of_the_trained_gives_transformers_the_same_loss(case: Case, spanning: Path) -> None:
    check_export(spanning, case)


def test_gpt2_named_as_openai_did_keeps_those_names_after_training(spanning: Path, tmp_path: Path) -> None:
    case = next(case for case in SPANNING if case.is_openai)
    ended = reshard("export", case.folder(spanning, "trained"), "--to", "hf", "--out", tmp_path / "exported", "--quiet")
    assert ended.code == 0, ended.err
    before, after = (load_file(folder / "model.safetensors") for folder in
                     (case.folder(spanning, "source"), tmp_path / "exported"))  # fmt: skip
    # Masks are what the model computes: training leaves them behind.
    assert after.keys() == {name for name in before if not name.endswith(".attn.bias")}


RANDOM = {
    "tiny-gpt2": {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True},
    "tiny-mixtral": {"router_jitter_noise": 0.1, "attention_dropout": 0.1},
}


def test_runs_with_dropout_go_on_as_if_they_had_not_been_interrupted(tmp_path: Path) -> None:
    jobs = []
    for name, changes in RANDOM.items():
        place = tmp_path / name
        save_decoder(place / "source", name, **changes)
        packed = reshard("pack", place / "source", "--layout", "pp=2", "--out", place / "packed", "--quiet")
        assert packed.code == 0, packed.err
        flags = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 4, "--lr", LR, "--steps", 4)
        resume = ("--resume", place / "whole" / "step-000002")
        for run, more in (("whole", ("--checkpoint-every", 2)), ("resumed", resume)):
            args = (*flags, "--checkpoint", place / run, "--log-dir", place / f"{run}-log", *more)
            log = tmp_path / f"{name}-{run}.log"
            jobs.append({"root": str(place / "packed"), "args": [str(arg) for arg in args], "log": str(log)})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    launch(NUM_RANKS, "resume_worker.py", tmp_path / "jobs.json")
    for name in RANDOM:
        whole, resumed = (steps_of(tmp_path / name / f"{run}-log") for run in ("whole", "resumed"))
        assert list(whole) == [1, 2, 3, 4]
        assert resumed == {step: whole[step] for step in (3, 4)}, (tmp_path / f"{name}-resumed.log").read_text()


def steps_of(log: Path) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_every_variant_on_every_kind_of_schedule_trains_and_exports_as_transformers_does(
    case: Case, slow: Path
) -> None:
    check_training(slow, case)
    check_export(slow, case)
