"""A rank that evaluates packed models, one job after the other.

usage: reading_worker.py JOBS OUT

JOBS is a JSON list of the arguments of `runner eval`; rank 0 writes a line of JSON for each to OUT. Every rank prints
how long the longest message is that it sends to all others.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.bundle.packed import open_packed
from runner.distributed.world import World, join_world
from runner.evaluation.evaluate import loss_over
from runner.evaluation.options import parse_eval

CPU = torch.device("cpu")


def run_job(args: list[str], world: World) -> tuple[float, int]:
    evaluated = parse_eval(args)
    return loss_over(evaluated, open_packed(evaluated.manifest), world, CPU)


def main(jobs: Path, out: Path) -> None:
    gather, sizes = dist.all_gather_object, [0]

    def measured(values: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
        sizes.append(len(pickle.dumps(value)))
        gather(values, value, group)

    dist.all_gather_object = measured
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    lines = [json.dumps(run_job(job, world)) for job in json.loads(jobs.read_text())]
    if world.rank == 0:
        out.write_text("\n".join(lines))
    print("longest message to all:", max(sizes), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
