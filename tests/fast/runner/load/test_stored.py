"""Loading on a rank of a job: what is missing, and when that is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from manifests.errors import ShardError
from runner.bundle.packed import open_packed
from runner.load.deferred import DeferredVerification
from runner.load.load import Reading
from runner.load.stored import StageLoader
from runner.tensors.local_shard import whole_pieces
from tests.builders import weights_path
from tests.fast.trained import write_trained


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_broadcast", [False, True])
def test_missing_shard_is_named_before_what_runs_beside_reading(is_broadcast: bool, tmp_path: Path) -> None:
    origin = open_packed(write_trained(tmp_path, "pp=2"))
    pieces = whole_pieces({fqn: torch.empty(shape) for fqn, shape in origin.shape.tensors.items()})
    (origin.root / weights_path(1, 2)).unlink()
    loader = StageLoader(
        origin=origin, cache=None, group=dist.group.WORLD, is_broadcast=is_broadcast, device=torch.device("cpu"),
        how=Reading(), deferred=DeferredVerification(is_needed=False),
    )  # fmt: skip
    reached = []
    with pytest.raises(ShardError) as caught, loader.reading(pieces):
        reached.append("the self-check")
    assert (caught.value.code, reached) == ("shard.missing", [])
