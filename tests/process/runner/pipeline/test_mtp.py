"""MTP layers trained over real ranks, against one process that runs a model written from DeepSeek-V3's report."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.config.flags import parse_training
from runner.proof.float64 import float32_as_float64
from tests.process.runner.pipeline.mtp_oracle import CASES, FLAGS, train_alone
from tests.process.torchrun import launch

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("mtp")
    launch(2, "runner/pipeline/mtp_worker.py", out)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    with float32_as_float64():
        expected = train_alone(CASES[name], parse_training(list(FLAGS)).optim)
    results = [rank[name] for rank in ranks]
    for result in results:
        assert torch.tensor(result["losses"]).sub(torch.tensor(expected.losses)).abs().max() < TOLERANCE
    copies = ("layers.4.embed_tokens", "layers.5.embed_tokens", "shared_head.head")  # beside the owner: no gradient
    for kind, tensors in (("gradients", expected.gradients), ("weights", expected.weights)):
        named = [pair for result in results for pair in result[kind]]
        missing = tensors.keys() - {fqn for fqn, _ in named}
        assert all(any(copy in fqn for copy in copies) for fqn in missing) if kind == "gradients" else not missing
        for fqn, tensor in named:
            largest = tensors[fqn].abs().max().clamp_min(1e-9)
            assert (tensor - tensors[fqn]).abs().max() / largest < TOLERANCE, (kind, fqn)
