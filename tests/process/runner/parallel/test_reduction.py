"""The dtypes of gradients of shards: each rank's sum is rounded once to that of the reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fast.runner.tiny import save_model
from tests.fast.runner.training.test_compute import DTYPES, REDUCED
from tests.process.torchrun import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    place = tmp_path_factory.mktemp("reduction")
    save_model(place / "model", num_hidden_layers=2)
    launch(2, "runner/parallel/reduction_worker.py", place / "model", place)
    return [torch.load(place / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", REDUCED)
def test_sums_of_microbatches_are_rounded_once_to_the_dtype_of_the_reduction(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    reduced, master = (DTYPES[dtype] for dtype in (REDUCED[name].reduce_dtype, REDUCED[name].master_dtype))
    sums = [rank[name][1] for rank in ranks]
    for fqn, part in sums[0].items():
        expected = (part.to(reduced) + sums[1][fqn].to(reduced)).to(master)
        for rank, shard in enumerate(torch.chunk(expected, 2)):
            gradient = ranks[rank][name][0][fqn]
            assert gradient.dtype == master
            assert torch.equal(gradient, shard), fqn
