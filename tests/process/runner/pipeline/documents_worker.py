"""A rank that trains packed documents in a pipeline, compared with each document by itself.

usage: documents_worker.py OUT ARCHITECTURE...

OUT/RANK.json gets the largest difference of the loss and of each gradient, by architecture and schedule.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed as dist

from manifests.placement import Placement
from runner.distributed.world import World, join_world
from tests.fast.runner.pipeline.documents import Alone

SCHEDULES = {
    "1F1B": Placement(num_stages=2, num_ranks=2),
    "ZBVZeroBubble": Placement(num_stages=4, num_ranks=2, style="v"),
}


def main(out: Path, architectures: list[str]) -> None:
    warnings.simplefilter("ignore")
    world = World.from_environment(os.environ)
    join_world(torch.device("cpu"), timeout_s=60)
    found = {}
    for architecture in architectures:
        alone = Alone(architecture)
        for schedule, placement in SCHEDULES.items():
            found[f"{architecture} {schedule}"] = alone.differences(schedule, placement, world.rank)
    (out / f"{world.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
