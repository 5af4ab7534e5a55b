"""Every family: packed, trained on real ranks, saved and exported, against transformers.

The reference is the model that transformers loads, whole, accumulating the same microbatches in the same order.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from runner.data.sequences import Batch
from tests.builders import pack, reshard
from tests.fast.runner.models.decoders import name_as_openai_did, save_decoder, tied_name
from tests.fast.runner.models.titans import in_files, load
from tests.fast.runner.tiny import HEAD
from tests.process.runner.models.family_cases import (
    COMPILED,
    LR,
    MICROBATCH,
    NORMAL,
    SLOW,
    STEPS,
    Case,
    batch_of,
    evaluated_batch,
)
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(1200)
NAMED: dict[str, Any] = {"ids": lambda case: case.name}


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
        pack(
            source, case.folder(place, "packed"), case.layout, "--pp", str(case.num_ranks // case.num_shards), "--quiet"
        )
    for num_ranks in sorted({case.num_ranks for case in cases}):
        launch(num_ranks, "runner/models/family_worker.py", place, which, timeout_s=timeout_s)
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("families"), "normal", NORMAL, 150)


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("slow_families"), "slow", SLOW, 800)


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


def summed_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")


@cache
def train_transformers(source: Path, experts: str | None) -> Run:
    model, run = load(source, experts), Run()
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
        norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in model.parameters()]
        run.norms.append(math.sqrt(math.fsum(norm.square().item() for norm in norms)))
        if step == 0:
            run.gradients = in_files(model, source, gradients=True)
        optimizer.step()
    return run


def microbatches(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(torch.split(batch.tokens, MICROBATCH), torch.split(batch.labels, MICROBATCH), strict=True)


def check_training(place: Path, case: Case) -> None:
    found, expected = read_run(place, case), train_transformers(case.folder(place, "source"), case.experts)
    owner = tied_name(expected.gradients)
    assert found.gradients.keys() - ({HEAD} if case.is_tied else set()) == expected.gradients.keys()
    for fqn, gradient in found.gradients.items():
        other = expected.gradients[owner if case.is_tied and fqn == HEAD else fqn]  # of each copy, the sum of both
        if case.is_bitwise:
            assert torch.equal(gradient, other), fqn
        else:
            assert (gradient - other).norm() <= case.tolerance * (other.norm() or 1.0), fqn
    exact = 1e-12 if case.is_bitwise else None
    is_same_forward = not case.is_compiled and not case.loss_chunk
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-12 if is_same_forward else 3e-7)
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=exact or case.tolerance)
    # Adam makes much of little: where gradients differ in their last bits, so do later steps, more.
    assert found.losses == pytest.approx(expected.losses, rel=exact or 1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=exact or 1e-3)


def check_export(place: Path, case: Case) -> None:
    source, exported = (case.folder(place, what) for what in ("source", "exported"))
    ended = reshard("export", case.folder(place, "trained"), "--to", "hf", "--out", exported, "--quiet")
    assert ended.code == 0, ended.err
    run, loss = read_run(place, case), loss_on_evaluated(exported)
    assert run.loss_after == pytest.approx(loss, rel=1e-5)
    assert run.loss_after != pytest.approx(loss_on_evaluated(source), rel=2e-5)  # it has learnt
    before, after = (load_file(folder / "model.safetensors") for folder in (source, exported))
    # Masks are what OpenAI's model computes: training leaves them behind.
    assert after.keys() == {fqn for fqn in before if not (case.is_openai and fqn.endswith(".attn.bias"))}
    for fqn, tensor in after.items():
        is_constant = fqn.endswith("e_score_correction_bias")
        assert torch.equal(tensor, before[fqn]) == is_constant, fqn


@torch.no_grad()
def loss_on_evaluated(folder: Path) -> float:
    batch = evaluated_batch()
    return summed_loss(load(folder).eval(), batch.tokens, batch.labels).item() / batch.num_tokens


@pytest.mark.parametrize("case", NORMAL, **NAMED)
def test_gradients_losses_and_norms_are_those_of_transformers(case: Case, runs: Path) -> None:
    check_training(runs, case)


@pytest.mark.parametrize("case", NORMAL, **NAMED)
def test_export_of_the_trained_gives_transformers_the_same_loss_and_what_is_not_trained_unchanged(
    case: Case, runs: Path
) -> None:
    check_export(runs, case)


RANDOM = {
    "tiny-gpt2": {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True},
    "tiny-mixtral": {"router_jitter_noise": 0.1, "attention_dropout": 0.1},
}


def whole_and_resumed(place: Path, *resumed: str) -> list[dict[str, Any]]:
    """Pack a model, and describe four steps, and two steps from the middle of those with more flags."""
    pack(place / "source", place / "packed", "pp=2", "--quiet")
    flags = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 4, "--lr", LR, "--steps", 4, "--no-self-check",
             "--checkpoint")  # fmt: skip
    resumed = ("--resume", place / "whole" / "step-000002", *resumed)
    return [
        job(place / "packed", place / f"{run}-log", *flags, place / run, *more)
        for run, more in (("whole", ("--checkpoint-every", 2)), ("resumed", resumed))
    ]


def steps_of(log: Path) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines_of(log) if "loss" in line}


def test_resumed_runs_go_on_with_dropout(tmp_path: Path) -> None:
    jobs = []
    for name, changes in RANDOM.items():
        save_decoder(tmp_path / name / "source", name, **changes)
        jobs += whole_and_resumed(tmp_path / name)
    run_jobs(2, jobs)
    for name in RANDOM:
        whole, resumed = (steps_of(tmp_path / name / f"{run}-log") for run in ("whole", "resumed"))
        assert list(whole) == [1, 2, 3, 4]
        assert resumed == {step: whole[step] for step in (3, 4)}, said(tmp_path / name / "resumed-log")


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, **NAMED)
def test_every_variant_trains_and_exports_as_transformers_does(case: Case, slow_runs: Path) -> None:
    check_training(slow_runs, case)
    check_export(slow_runs, case)


@pytest.mark.slow
def test_compiled_experts_recomputed_selectively_train_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("NO C++ COMPILER: torch.compile on the CPU was not tested")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # a killed rank may leave half a library
    run_cases(tmp_path, "compiled", COMPILED, 1000)
    for case in COMPILED:
        check_training(tmp_path, case)
