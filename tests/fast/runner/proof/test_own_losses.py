"""The self-check of runs with a loss of another package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from manifests.errors import UsageError
from runner.data.rows import IGNORED, RowForm
from runner.pipeline.losses import Loss
from runner.proof.proving import compare
from runner.proof.stages import tiny_of
from tests.fast.runner.proof.combinations import combination

pytestmark = pytest.mark.usefixtures("one_rank")


def test_loss_that_raises_is_named() -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("reference")

    run = replace(combination("LlamaForCausalLM"), loss=Loss(fail, RowForm(), is_own=True))
    with pytest.raises(UsageError) as error:
        compare(run)
    assert (error.value.code, error.value.where) == ("options.loss", "rank 0: --loss")


def sum_where(counts: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits.flatten(0, 1).float()
    losses = cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=IGNORED)
    return (losses.view(labels.shape) * counts).sum()


def test_loss_of_tokens_with_a_flag_passes() -> None:
    def of_answers(logits: torch.Tensor, labels: torch.Tensor, *, is_answer: torch.Tensor) -> Any:
        counts = (labels != IGNORED) & (is_answer == 1)
        return sum_where(counts, logits, labels), counts.sum()

    form = RowForm(per_token=("is_answer",))
    assert compare(replace(combination("LlamaForCausalLM"), loss=Loss(of_answers, form, is_own=True)))[1] is None


@pytest.mark.parametrize("least", [0, 1])
def test_loss_that_counts_no_random_token_is_named(least: int) -> None:
    def of_others(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        counts = labels == 95_000
        return sum_where(counts, logits, labels), counts.sum().clamp(min=least)

    run = replace(combination("LlamaForCausalLM"), loss=Loss(of_others, RowForm(), is_own=True))
    with pytest.raises(UsageError) as error:
        compare(run)
    assert (error.value.code, error.value.where) == ("options.loss", "rank 0: --loss")


class Weighted(nn.Module):
    """A loss with a weight of each token, as of a class, in float32."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, vocab_size))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        logits, weight = logits.flatten(0, 1).float(), self.get_buffer("weight")
        summed = cross_entropy(logits, labels.flatten(), weight, reduction="sum", ignore_index=IGNORED)
        return summed, (labels != IGNORED).sum()


def test_loss_with_a_float32_tensor_is_compared_in_float32() -> None:
    run = combination("LlamaForCausalLM")
    weight = torch.linspace(0.5, 1.5, tiny_of(run.family).vocab_size)

    def weighted(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = logits.flatten(0, 1).float()
        summed = cross_entropy(logits, labels.flatten(), weight, reduction="sum", ignore_index=IGNORED)
        return summed, (labels != IGNORED).sum()

    distances, problem = compare(replace(run, loss=Loss(weighted, RowForm(), is_own=True)))
    assert problem is None
    assert distances is not None
    assert distances.dtype == "fp32"


@pytest.mark.parametrize("dtypes", [(), ("--dtype", "bf16", "--master-dtype", "fp32")])
def test_loss_with_a_buffer_passes_and_is_moved_to_the_device_of_the_logits(dtypes: tuple[str, ...]) -> None:
    run = combination("LlamaForCausalLM", 1, *dtypes)
    vocab_size = tiny_of(run.family).vocab_size
    module = Weighted(vocab_size)
    loss = Loss(module, RowForm(), is_own=True)
    assert compare(replace(run, loss=loss))[1] is None
    assert module.get_buffer("weight").dtype == torch.float32
    labels = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    loss(torch.empty(1, 2, vocab_size, device="meta"), labels, num_tokens=1)
    assert module.get_buffer("weight").is_meta
