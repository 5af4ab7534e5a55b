"""MTP layers trained over real ranks, against one process that runs a model written from DeepSeek-V3's report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runner.config.flags import parse_training
from runner.proof.tiny_step import float32_as_float64
from tests.process.runner.pipeline.mtp_oracle import CASES, FLAGS, train_alone
from tests.process.torchrun import launch

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return what each rank has of a case, which is run together with those alike."""
    results: dict[str, list[dict[str, Any]]] = {}

    def results_of(name: str) -> list[dict[str, Any]]:
        if name not in results:
            kind = (CASES[name].num_ranks, CASES[name].is_slow)
            names = [other for other, case in CASES.items() if (case.num_ranks, case.is_slow) == kind]
            out = tmp_path_factory.mktemp("mtp")
            launch(kind[0], "runner/pipeline/mtp_worker.py", out, *names)
            saved = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(kind[0])]
            results.update({other: [of_rank[other] for of_rank in saved] for other in names})
        return results[name]

    return results_of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if case.is_slow else []) for name, case in CASES.items()]
)
def test_losses_gradients_and_weights_are_those_of_one_process(
    name: str, results_of: Callable[[str], list[dict[str, Any]]]
) -> None:
    with float32_as_float64():
        expected = train_alone(CASES[name], parse_training(list(FLAGS)).optim)
    for result in (results := results_of(name)):
        assert torch.tensor(result["evaluated"]).sub(torch.tensor(expected.losses)[:, 0]).abs().max() < TOLERANCE
        assert torch.tensor(result["losses"]).sub(torch.tensor(expected.losses)).abs().max() < TOLERANCE
    copies = ("layers.4.embed_tokens", "layers.5.embed_tokens", "shared_head.head")  # beside the owner: no gradient
    for kind, tensors in (("gradients", expected.gradients), ("weights", expected.weights)):
        named = [piece for result in results for piece in result[kind]]
        missing = tensors.keys() - {fqn for fqn, _, _ in named}
        assert all(any(copy in fqn for copy in copies) for fqn in missing) if kind == "gradients" else not missing
        for fqn, region, tensor in named:
            largest = tensors[fqn].abs().max().clamp_min(1e-9)
            assert (tensor - tensors[fqn][region]).abs().max() / largest < TOLERANCE, (kind, fqn)
