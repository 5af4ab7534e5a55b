"""Pipelines against `transformers`, and against one process that accumulates the same microbatches.

The references are written with torch alone: they share the model code with the runner, where the
comparison is bitwise, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.batches import Batch
from runner.chunk import build_chunks
from runner.families import family_for
from tests.fast.runner.tiny import EMBEDDING, HEAD, fill, load_model, padded_batch, read_config, save_model
from tests.process.parity_cases import BATCH, CASES, HALF, MATRIX, OPTIM, PLANTED, SEQ_LEN, STEPS, UNEVEN, Case
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@dataclass
class Run:
    """What came of a training run: per step, and by Hugging Face FQN."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "untied")
    save_model(folder / "tied", tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def runs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, run by real ranks: one launch for each number of them."""
    out = tmp_path_factory.mktemp("runs")
    for num_ranks in (1, 2, 4):
        launch(num_ranks, "parity_worker.py", models, out)
    return out


@pytest.fixture(scope="module")
def strict(models: Path) -> dict[tuple[str, torch.dtype], Run]:
    return {
        (weights, dtype): train_same_code(models / weights, weights == "tied", dtype)
        for weights, dtype in {(case.weights, case.dtype) for case in CASES}
    }


@pytest.fixture(scope="module")
def hugging_face(models: Path) -> dict[str, Run]:
    return {weights: train_transformers(models / weights) for weights in ("untied", "tied")}


def train_same_code(folder: Path, tied: bool, dtype: torch.dtype) -> Run:
    """Accumulate the microbatches in order through the runner's whole model; two copies of a tied weight."""
    family = family_for(read_config(folder), max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, (family.modules,), (0,))
    fill(chunks, folder, dtype)
    model = chunks[0].body
    named = {family.to_hf(name): parameter for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        named.values(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay
    )
    run = Run()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = accumulate(model, step)
        if tied:
            total = grad_of(named[EMBEDDING]) + grad_of(named[HEAD])
            named[EMBEDDING].grad, named[HEAD].grad = total, total.clone()
        norm = norm_of([p for name, p in named.items() if not (tied and name == HEAD)])
        for parameter in named.values():
            grad_of(parameter).mul_(min(1.0, OPTIM.max_norm / (norm + 1e-6)))
        run.losses.append(math.fsum(losses))
        run.norms.append(norm)
        run.gradients.append({name: grad_of(p).clone() for name, p in named.items()})
        optimizer.step()
    run.parameters = {name: parameter.detach().clone() for name, parameter in named.items()}
    return run


def accumulate(model: nn.Module, step: int) -> list[float]:
    batch = padded_batch(step)
    losses = []
    for tokens, labels in microbatches(batch):
        logits = model(tokens).float()
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.num_tokens
        torch.autograd.backward(loss)
        losses.append(loss.item())
    return losses


def train_transformers(folder: Path) -> Run:
    """Train the `transformers` model on whole batches, by its book."""
    model = load_model(folder).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay
    )
    run = Run(logits=model(padded_batch(0).tokens).logits.detach())
    for step in range(STEPS):
        batch = padded_batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_norm)
        run.losses.append(loss.item())
        run.norms.append(norm.item())
        run.gradients.append({name: grad_of(p).clone() for name, p in model.named_parameters()})
        optimizer.step()
    run.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def microbatches(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = BATCH.microbatch
    return zip(torch.split(batch.tokens, size), torch.split(batch.labels, size), strict=True)


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def norm_of(parameters: Iterable[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(grad_of(p).double().square().sum().item() for p in parameters))


def read_ranks(runs: Path, case: Case) -> list[dict[str, Any]]:
    return [torch.load(runs / case.name / f"rank{rank}.pt") for rank in range(case.num_ranks)]


def read_run(runs: Path, case: Case) -> Run:
    """Put the ranks' parts together; every rank must tell of the same losses and norms."""
    ranks = read_ranks(runs, case)
    run = Run(losses=ranks[0]["losses"], norms=ranks[0]["norms"])
    for rank in ranks:
        assert (rank["losses"], rank["norms"]) == (run.losses, run.norms)
        run.parameters |= rank["parameters"]
    run.gradients = [{k: v for rank in ranks for k, v in rank["gradients"][s].items()} for s in range(STEPS)]
    run.logits = next(rank["logits"] for rank in ranks if rank["logits"] is not None)
    return run


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Give the largest relative difference; a tied head is compared with the embedding."""
    assert found.keys() >= expected.keys() - {HEAD}
    return max(relative(found[name], expected.get(name, expected[EMBEDDING])) for name in found)


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() >= expected.keys() - {HEAD}
    return all(torch.equal(found[name], expected[name]) for name in found)


CORRECT = MATRIX + UNEVEN


@pytest.mark.parametrize("case", CORRECT, ids=lambda case: case.name)
def test_pipeline_equals_transformers(case: Case, runs: Path, hugging_face: dict[str, Run]) -> None:
    found, expected = read_run(runs, case), hugging_face[case.weights]
    assert found.logits is not None
    assert expected.logits is not None
    assert (found.logits - expected.logits).abs().max() <= 5e-6
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=0, abs=1e-6)
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-5)
    assert expected.norms[0] > OPTIM.max_norm
    assert worst(found.gradients[0], expected.gradients[0]) <= 1e-5
    assert worst(found.parameters, expected.parameters) <= 1e-3


@pytest.mark.parametrize("case", CORRECT + HALF, ids=lambda case: case.name)
def test_pipeline_is_bitwise_one_process(case: Case, runs: Path, strict: dict[tuple[str, torch.dtype], Run]) -> None:
    found, expected = read_run(runs, case), strict[case.weights, case.dtype]
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert all(same_bits(*pair) for pair in zip(found.gradients, expected.gradients, strict=True))
    assert same_bits(found.parameters, expected.parameters)


@pytest.mark.parametrize("case", CORRECT, ids=lambda case: case.name)
def test_every_rank_learns_the_token_count_and_the_loss_before_each_step(case: Case, runs: Path) -> None:
    for rank in read_ranks(runs, case):
        assert rank["num_tokens"] == [padded_batch(step).num_tokens for step in range(STEPS)]
        assert rank["evals"] == rank["losses"]


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.plant)
def test_planted_mistake_is_caught(
    case: Case, runs: Path, strict: dict[tuple[str, torch.dtype], Run], hugging_face: dict[str, Run]
) -> None:
    found = read_run(runs, case)
    exact, other = strict[case.weights, case.dtype], hugging_face[case.weights]
    # None of the three shows in the first loss.
    assert found.losses[0] == exact.losses[0]
    assert found.norms != exact.norms
    assert not same_bits(found.parameters, exact.parameters)
    assert found.norms[0] != pytest.approx(other.norms[0], rel=1e-5)
    assert worst(found.gradients[0], other.gradients[0]) > 1e-5


def test_wrong_mean_over_microbatches_is_caught(models: Path, strict: dict[tuple[str, torch.dtype], Run]) -> None:
    """The mean of each microbatch's mean is the classic mistake under padding."""
    model = load_model(models / "untied")
    batch = padded_batch(0)
    for tokens, labels in microbatches(batch):
        loss = cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()) / len(batch.tokens)
        torch.autograd.backward(loss)
    assert norm_of(model.parameters()) != pytest.approx(strict["untied", torch.float32].norms[0], rel=1e-2)
