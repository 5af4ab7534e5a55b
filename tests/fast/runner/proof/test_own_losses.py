"""The self-check of runs with a loss of another package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from manifests.errors import UsageError
from runner.data.rows import IGNORED, RowForm
from runner.pipeline.losses import Loss
from runner.proof.proving import compare
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
