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
from tests.process.transformers_cases import Case
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
_SCHEDULES = (("pp=2", "1F1B"), ("pp=2,vpp=2", "Interleaved1F1B"), ("pp=2,style=v", "ZBVZeroBubble"))
SLOW = tuple(
    Case(number=100 + number, model=name, changes=changes, layout=layout, schedule=schedule)
    for number, ((name, changes), (layout, schedule)) in enumerate(
        (variant, cut) for variant in TITANS for cut in _SCHEDULES
    )
)


def main(place: Path, cases: tuple[Case, ...]) -> None:
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    for case in cases:
        torch.save(run_case(case, place, world), case.folder(place, f"rank{world.rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"normal": NORMAL, "slow": SLOW}[sys.argv[2]])
