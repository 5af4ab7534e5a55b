"""Stages that hand on trees of tensors and constants, over real ranks, against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from runner.config.schema import BatchOptions
from tests.process.runner.pipeline.nested_cases import CUTS, SCHEDULES, Body, Toy, batch_of, fill_by_name
from tests.process.torchrun import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("nested")
    launch(2, "runner/pipeline/nested_worker.py", out)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


def one_process(cut: BatchOptions) -> tuple[float, dict[str, torch.Tensor]]:
    model, batch = Body(Toy.modules), batch_of[cut]
    fill_by_name(model)
    losses = []
    for tokens, labels in zip(batch.tokens.split(cut.microbatch), batch.labels.split(cut.microbatch), strict=True):
        logits = model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.num_tokens
        torch.autograd.backward(loss)
        losses.append(loss.item())
    return math.fsum(losses), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SCHEDULES)
def test_tree_of_tensors_and_constants_crosses_every_boundary(name: str, ranks: list[dict[str, Any]]) -> None:
    for index, cut in enumerate(CUTS * 2):
        loss, gradients = one_process(cut)
        found = [rank[name][index] for rank in ranks]
        (last,) = (result for result in found if result["loss"] is not None)
        assert last["loss"] == last["evaluated"] == loss
        merged = {key: gradient for result in found for key, gradient in result["gradients"].items()}
        assert merged.keys() == gradients.keys()
        assert all(torch.equal(merged[key], gradient) for key, gradient in gradients.items())
