"""Pipelines against `transformers`, and bit for bit against one process that accumulates the same microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fast.runner.models.decoders import save_decoder
from tests.fast.runner.tiny import save_model
from tests.process.runner.pipeline.parity_cases import (
    CHANGES,
    EVALUATED,
    FROM_CSV,
    HALF,
    LLAMA,
    NORMAL,
    OPTIM,
    SLOW,
    SPANNING,
    THROUGH_HOST,
    Case,
    batch_of,
    folder_of,
)
from tests.process.runner.pipeline.parity_reference import (
    Run,
    differences,
    train_same_code,
    train_transformers,
    worst,
)
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(1800)

# Where no rotation follows, a bias of keys moves all scores of a query alike: its gradient is rounding, of which
# AdamW makes steps.
ROUNDING = ("k_proj.bias", "k_layernorm.bias", "c_attn.bias")
CORRECT = SPANNING + FROM_CSV  # of llama: `test_families` trains other families, and slow tests here all of them
NAMED: dict[str, Any] = {"ids": lambda case: case.name}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of each family that is asked for, with a head of its own or a tied one; see `save_models`."""
    return tmp_path_factory.mktemp("models")


def save_models(models: Path, cases: Iterable[Case]) -> None:
    for family, weights in {(case.family, case.weights) for case in cases}:
        folder = folder_of(models, family, weights)
        tied = {"tie_word_embeddings": weights == "tied", "pad_token_id": 7}  # whose row the embedding does not train
        if not folder.exists() and family == LLAMA:
            save_model(folder, **tied)
        elif not folder.exists():
            save_decoder(folder, family, **CHANGES[family], **tied)


@pytest.fixture(scope="module")
def runs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case but the slow ones, run by real ranks: one launch for each number of them."""
    out = tmp_path_factory.mktemp("runs")
    save_models(models, NORMAL)
    for num_ranks in (1, 2, 4):
        launch(num_ranks, "runner/pipeline/parity_worker.py", models, out, "normal", timeout_s=500)
    return out


@pytest.fixture(scope="module")
def slow_runs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's slow cases, run when the first of them is asked for."""

    @cache
    def run(family: str) -> Path:
        out, cases = tmp_path_factory.mktemp(f"slow_{family}"), [case for case in SLOW if case.family == family]
        save_models(models, cases)
        for num_ranks in sorted({case.num_ranks for case in cases}):
            launch(num_ranks, "runner/pipeline/parity_worker.py", models, out, family, timeout_s=900)
        return out

    return run


@cache
def reference(models: Path, case: Case) -> Run:
    folder, tied = folder_of(models, case.family, case.weights), case.weights == "tied"
    return _same_code(folder, tied, case.dtype, case.order, case.steps)


_same_code, hugging_face = cache(train_same_code), cache(train_transformers)


def read_ranks(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(num_ranks)]


def read_run(runs: Path, case: Case) -> Run:
    """Put the ranks' parts together; every rank must tell of the same losses, norms and numbers of tokens."""
    ranks = read_ranks(runs / case.name, case.num_ranks)
    run = Run(losses=ranks[0]["losses"], norms=ranks[0]["norms"])
    for rank in ranks:
        assert (rank["losses"], rank["norms"]) == (run.losses, run.norms)
        assert rank["num_tokens"] == [batch_of(step, case.vocab_size).num_tokens for step in range(case.steps)]
        run.parameters |= rank["parameters"]
    run.gradients = [
        {fqn: gradient for part in parts for fqn, gradient in part.items()}
        for parts in zip(*(rank["gradients"] for rank in ranks), strict=True)
    ]
    return run


def check_transformers(case: Case, found: Run, expected: Run) -> None:
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=3e-7)  # 2.5 roundings, which differ by processor
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-5)
    assert expected.norms[0] > OPTIM.max_norm
    assert worst(found.gradients[0], expected.gradients[0]) <= 1e-5
    for tolerance, is_rounding in ((1e-3, False), (1e-2, True)):
        ours, theirs = (
            {fqn: tensor for fqn, tensor in run.parameters.items() if fqn.endswith(ROUNDING) == is_rounding}
            for run in (found, expected)
        )
        assert not theirs or worst(ours, theirs) <= tolerance


@pytest.mark.parametrize("case", CORRECT, **NAMED)
def test_pipeline_equals_transformers(case: Case, runs: Path, models: Path) -> None:
    expected = hugging_face(folder_of(models, case.family, case.weights), case.steps)
    check_transformers(case, read_run(runs, case), expected)


@pytest.mark.parametrize("case", CORRECT + HALF + THROUGH_HOST, **NAMED)
def test_pipeline_is_bitwise_one_process(case: Case, runs: Path, models: Path) -> None:
    assert differences(read_run(runs, case), reference(models, case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, **NAMED)
def test_every_pair_of_a_family_a_schedule_and_ranks_is_bitwise_one_process_and_equals_transformers(
    case: Case, slow_runs: Callable[[str], Path], models: Path
) -> None:
    found = read_run(slow_runs(case.family), case)
    assert differences(found, reference(models, case)) == []
    check_transformers(case, found, hugging_face(folder_of(models, case.family, case.weights), case.steps))


@pytest.mark.parametrize("case", CORRECT, **NAMED)
def test_evaluation_gives_the_loss_before_each_step_on_every_rank(case: Case, runs: Path) -> None:
    for rank in read_ranks(runs / case.name, case.num_ranks):
        assert rank["evals"] == rank["losses"][:EVALUATED]
