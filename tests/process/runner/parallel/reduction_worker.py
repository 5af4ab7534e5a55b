"""A rank that trains a step of its own rows with shards on all ranks, in each of some dtypes, and saves its gradients.

usage: reduction_worker.py MODEL OUT

OUT/RANK.pt has, by name, the rank's shards of reduced gradients, and whole gradients of its rows by autograd alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist

from runner.distributed.world import World, join_world
from tests.fast.runner.tiny import CPU
from tests.fast.runner.training.test_compute import REDUCED, add_up, gradients_of_shards


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    result = {
        name: (gradients_of_shards(model, compute, world.rank), add_up(model, compute, world.rank, 1))
        for name, compute in REDUCED.items()
    }
    torch.save(result, out / f"{world.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
