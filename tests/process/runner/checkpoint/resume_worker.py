"""A rank that runs training jobs one after the other, as `runner.train` does.

usage: resume_worker.py JOBS

JOBS is a JSON list of {"root": …, "args": […], "log": …}; a job's log gets what rank 0 logs, the code and place of its
error, which every rank prints, and how many stages it has in memory whenever it has loaded some. With "opened", a file
of that name and the rank's number gets the weight files that a rank opens; "path" is a folder that modules are imported
from; "round" is how many elements of an owner's tensors are exchanged at a time.
{rank} in an argument, or in "cwd", a folder to train in, is the rank's number: a path on a disk that is its node's own.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.errors import UserError
from runner.bundle.packed import open_packed
from runner.config.flags import parse_training
from runner.distributed.fail_together import OneRankError, raise_on_all_ranks
from runner.distributed.world import World, join_world
from runner.pipeline.chunk import StageChunk
from runner.train import run
from runner.training import whole_matrix

CPU = torch.device("cpu")
ROUND = whole_matrix._ROUND


class Log(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if "loaded %d tensors" in record.msg:
            chunks = sum(isinstance(found, StageChunk) for found in gc.get_objects())
            print(f"{chunks} stages in memory", file=self.stream)


def note_opened(log: str) -> None:
    os.environ["OPENED_LOG"] = log
    import tests.process.opened.sitecustomize  # noqa: F401  # for as long as the process lives


def run_job(job: dict[str, Any], world: World) -> None:
    logger = logging.getLogger("runner")
    handler = Log(job["log"]) if world.rank == 0 else logging.NullHandler()
    logger.addHandler(handler)
    args = [arg.replace("{rank}", str(world.rank)) for arg in job["args"]]
    before = os.getcwd()
    os.chdir(job.get("cwd", before).replace("{rank}", str(world.rank)))
    sys.path[:0] = [job["path"]] if "path" in job else []
    if "opened" in job:
        note_opened(job["opened"])
    whole_matrix._ROUND = job.get("round", ROUND)
    gc.collect()  # what the job before has left
    try:
        with raise_on_all_ranks("manifest"):
            launched = open_packed(Path(job["root"]))
        run(launched, parse_training(args), world, CPU)
    except UserError as error:
        print(f"error: {error.code} at {error.where}")
        logger.error("error: %s at %s", error.code, error.where)
        if isinstance(error, OneRankError):  # unless all ranks have met it, the others wait for this one
            dist.monitored_barrier(timeout=timedelta(seconds=20))
    finally:
        os.chdir(before)
        logger.removeHandler(handler)
        handler.close()


def main(jobs: Path) -> None:
    logging.getLogger("runner").setLevel(logging.INFO)
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    for job in json.loads(jobs.read_text()):
        run_job(job, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
