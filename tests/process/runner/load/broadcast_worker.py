"""A rank that reads all weights with others for their devices, of which the last does not exist.

usage: broadcast_worker.py PACKED

It prints the code of the error, and the rank that it names.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed as dist

from manifests.errors import UserError
from runner.bundle.packed import open_packed
from runner.distributed.world import World, join_world
from runner.load.load import Reading, plan_reads
from runner.load.stored import read_for_all
from runner.tensors.local_shard import whole_pieces


def main(packed: str) -> None:
    world = World.from_environment(os.environ)
    join_world(torch.device("cpu"), timeout_s=60)
    device = torch.device("cuda:99" if world.rank == world.size - 1 else "cpu")
    origin = open_packed(packed)
    pieces = whole_pieces({fqn: torch.empty(shape) for fqn, shape in origin.shape.tensors.items()})
    reads, group = plan_reads(pieces, origin.bundles, origin.shape), dist.group.WORLD
    assert group is not None
    try:
        read_for_all(reads, group, device, Reading())
    except UserError as error:
        print(error.code, "of", error.where.partition(":")[0], flush=True)
    except (AssertionError, RuntimeError) as error:  # torch's own
        print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
