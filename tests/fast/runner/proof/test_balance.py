"""What balances experts: of every architecture with routers, a step is that of one process of transformers' model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed as dist

from manifests.models.catalogue import catalogued, entry_of
from runner.proof.proving import compare
from tests.fast.runner.proof.combinations import combination

FLAGS = {
    name: (*(("--router-bias-rate", "0.001") if entry.router_bias else ()),
           *(("--router-aux-loss", "0.001") if entry.aux_loss else ()))
    for name in catalogued() if (entry := entry_of(name))
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name, flags in FLAGS.items() if flags])
def test_biases_and_gradients_of_routers_are_those_of_one_process(architecture: str) -> None:
    distances, problem = compare(combination(architecture, 1, *FLAGS[architecture]))
    assert problem is None
    assert distances is not None
    assert max(distances.largest.values()) <= 1e-10 or distances.dtype == "fp32"
