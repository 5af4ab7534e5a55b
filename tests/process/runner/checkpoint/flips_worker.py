"""A rank that runs jobs on checkpoints with one bit flipped, and puts every bit back.

usage: flips_worker.py JOBS OUT

JOBS is a JSON list of {"name": …, "kind": "train" or "eval", "root": …, "args": […], "flip": null or
[file, position, bit]}. OUT/NAME.json is how a job ended: the code and place of its refusal, or null, and its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.errors import UserError
from runner.bundle.packed import open_packed
from runner.config.flags import parse_training
from runner.distributed.world import World, join_world
from runner.evaluation.evaluate import loss_over
from runner.evaluation.options import parse_eval
from runner.train import run

CPU = torch.device("cpu")


def flip(file: str, position: int, bit: int) -> None:
    with open(file, "r+b") as stream:
        stream.seek(position)
        (byte,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes((byte ^ 1 << bit,)))


def run_job(job: dict[str, Any], world: World) -> dict[str, Any]:
    root, args = Path(job["root"]), job["args"]
    try:
        if job["kind"] == "train":
            run(open_packed(root), parse_training(args), world, CPU)
        else:
            loss_over(parse_eval([str(root), *args]), open_packed(root), world, CPU)
    except UserError as error:
        return {"code": error.code, "where": error.where, "exit_code": error.exit_code}
    return {"code": None, "where": None, "exit_code": 0}


def main(jobs: Path, out: Path) -> None:
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    for job in json.loads(jobs.read_text()):
        gc.collect()  # what the job before has left
        if world.rank == 0 and job["flip"]:
            before = os.stat(job["flip"][0])
            flip(*job["flip"])
        dist.barrier()
        found = run_job(job, world)
        everyone: list[dict[str, Any]] = [{}] * world.size
        dist.all_gather_object(everyone, found)
        assert all(rank["exit_code"] == found["exit_code"] for rank in everyone), everyone
        if world.rank == 0:
            if job["flip"]:
                flip(*job["flip"])
                os.utime(job["flip"][0], ns=(before.st_atime_ns, before.st_mtime_ns))
            (out / f"{job['name']}.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
