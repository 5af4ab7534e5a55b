"""torchtitan's families: packed, trained on 1, 2 and 4 ranks, saved and exported, against transformers' models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.builders import reshard
from tests.fast.runner.tiny import EMBEDDING, HEAD
from tests.fast.runner.titans import in_files, load, save_titan, worst
from tests.process.families_worker import NORMAL, SLOW
from tests.process.test_transformers_road import Run, microbatches, read_run, summed_loss
from tests.process.torchrun import launch
from tests.process.transformers_cases import LR, STEPS, Case, batch_of, evaluated_batch

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
NAMED: dict[str, Any] = {"ids": lambda case: case.name}


def run_cases(place: Path, which: str, cases: tuple[Case, ...], timeout_s: int) -> Path:
    for case in cases:
        save_titan(case.folder(place, "source"), case.model, **case.changes)
        packed = reshard("pack", case.folder(place, "source"), "--layout", case.layout, "--pp", str(case.num_ranks),
                         "--out", case.folder(place, "packed"), "--quiet")  # fmt: skip
        assert packed.code == 0, packed.err
    for num_ranks in sorted({case.num_ranks for case in cases}):
        launch(num_ranks, "families_worker.py", place, which, timeout_s=timeout_s)
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("families"), "normal", NORMAL, 150)


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("slow_families"), "slow", SLOW, 800)


def train_transformers(source: Path) -> Run:
    model, run = load(source), Run()
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
            run.gradients = in_files(model, source, gradients=True)
        optimizer.step()
    return run


def check_training(place: Path, case: Case) -> None:
    found, expected = read_run(place, case), train_transformers(case.folder(place, "source"))
    if case.is_tied:  # of each copy, the sum of both
        assert torch.equal(found.gradients.get(HEAD, found.gradients[EMBEDDING]), found.gradients[EMBEDDING])
        found.gradients.pop(HEAD, None)
    assert worst(found.gradients, expected.gradients) <= 1e-5
    assert found.losses[0] == pytest.approx(expected.losses[0], abs=1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-5)


def check_export(place: Path, case: Case) -> None:
    source, exported = (case.folder(place, what) for what in ("source", "exported"))
    ended = reshard("export", case.folder(place, "trained"), "--to", "hf", "--out", exported, "--quiet")
    assert ended.code == 0, ended.err
    batch, run = evaluated_batch(), read_run(place, case)
    with torch.no_grad():
        loss = summed_loss(load(exported), batch.tokens, batch.labels).item() / batch.num_tokens
    assert run.loss_after == pytest.approx(loss, rel=1e-5)
    assert abs(run.loss_after - run.losses[0]) > 1e-3  # it has learnt
    before, after = (load_file(folder / "model.safetensors") for folder in (source, exported))
    assert before.keys() == after.keys()
    for fqn, tensor in before.items():
        is_constant = fqn.endswith("e_score_correction_bias")
        assert torch.equal(tensor, after[fqn]) == is_constant, fqn


@pytest.mark.parametrize("case", NORMAL, **NAMED)
def test_gradients_losses_and_norms_are_those_of_transformers(case: Case, runs: Path) -> None:
    check_training(runs, case)


@pytest.mark.parametrize("case", NORMAL, **NAMED)
def test_export_of_the_trained_gives_transformers_the_same_loss_and_what_is_not_trained_unchanged(
    case: Case, runs: Path
) -> None:
    check_export(runs, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, **NAMED)
def test_every_variant_on_every_kind_of_schedule_trains_and_exports_as_transformers_does(
    case: Case, slow_runs: Path
) -> None:
    check_training(slow_runs, case)
    check_export(slow_runs, case)
