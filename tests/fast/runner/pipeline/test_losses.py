"""What a loss of another package may ask of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from manifests.errors import UsageError
from runner.config.flags import parse_training
from runner.pipeline import losses
from runner.pipeline.losses import Loss, PerRow, loss_of_run

DATA = ("--data", "rows.jsonl", "--tokenized", "--loss", "pairs")


def pairs(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    return logits.sum(), len(labels) // 2


def load(monkeypatch: pytest.MonkeyPatch, function: Any, *flags: str) -> Loss | None:
    monkeypatch.setattr(losses, "load_entry_point", lambda *names: function)
    return loss_of_run(parse_training([*DATA, *flags]), is_split=False)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--microbatch", "3", "--global-batch", "6"),
        ("--microbatch", "2", "--shuffle"),
        ("--microbatch", "2", "--data-weight", "1"),
        ("--microbatch", "2", "--skip-bad-documents"),
    ],
)
def test_loss_over_pairs_is_refused_where_they_are_torn(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "num_together", 2, raising=False)
    with pytest.raises(UsageError) as error:
        load(monkeypatch, pairs, *flags)
    assert (error.value.code, error.value.where) == ("options.loss", "--loss pairs")
    loss = load(monkeypatch, pairs, "--microbatch", "4")
    assert loss is not None
    assert loss.num_together == 2


class Pairs:
    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *, reference: PerRow) -> tuple[torch.Tensor, int]:
        return reference.sum(), len(labels)


@pytest.mark.parametrize("function", [partial(Pairs()), Pairs, Pairs().__call__, 1])
def test_loss_whose_fields_are_not_to_be_read_is_refused(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as error:
        load(monkeypatch, function)
    assert (error.value.code, error.value.where) == ("options.loss", "--loss pairs")
    loss = load(monkeypatch, Pairs())
    assert loss is not None
    assert loss.form.per_row == ("reference",)
