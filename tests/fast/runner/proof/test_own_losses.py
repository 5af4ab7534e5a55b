"""The self-check of runs with a loss of another package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manifests.errors import UsageError
from runner.data.rows import RowForm
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
