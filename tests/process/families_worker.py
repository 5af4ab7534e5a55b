"""A rank that trains a small model of each of torchtitan's families. Started by torchrun.

usage: families_worker.py PLACE normal|slow
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist

from runner.world import World, join_world
from tests.fast.runner.titans import TITANS
from tests.process.transformers_cases import Case, every_degree
from tests.process.transformers_worker import CPU, run_case

__all__ = ["NORMAL", "SLOW"]

_TIED = {"tie_word_embeddings": True}
NORMAL = (
    Case(number=0, model="tiny-mistral", changes={"sliding_window": 16}),
    Case(number=1, model="tiny-qwen3", changes=_TIED),
    Case(number=2, model="tiny-qwen3-moe", layout="pp=2,vpp=2", schedule="Interleaved1F1B"),
    Case(number=3, model="tiny-deepseek-v3", layout="pp=2,style=v", schedule="ZBVZeroBubble"),
    Case(number=4, model="tiny-gpt-oss"),
)
SLOW = every_degree(TITANS)


def main(place: Path, cases: tuple[Case, ...]) -> None:
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    for case in (case for case in cases if case.num_ranks == world.size):
        torch.save(run_case(case, place, world), case.folder(place, f"rank{world.rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"normal": NORMAL, "slow": SLOW}[sys.argv[2]])
