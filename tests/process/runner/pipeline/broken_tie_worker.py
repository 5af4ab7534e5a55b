"""A rank of a training job in which rank 1's copy of the tied weight changes after the second step.

usage: broken_tie_worker.py JOB

JOB is one of `resume_worker.py`'s; with "stops", rank 1 is asked to stop then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from runner.distributed.world import World, join_world
from tests.process.runner.checkpoint.resume_worker import CPU, run_job

_STEPS = count(1)


def break_tie(optimizer: torch.optim.Optimizer, *_: Any, stops: bool) -> None:
    """Flip the lowest bit of one element, which no loss would show."""
    if sum(len(group["params"]) for group in optimizer.param_groups) <= 2:
        return  # an algorithm is tried on tiny tensors before it is accepted
    if next(_STEPS) == 2:
        head = max((parameter for group in optimizer.param_groups for parameter in group["params"]), key=torch.numel)
        head.data.view(torch.int32)[0, 0] ^= 1
        if stops:
            os.kill(os.getpid(), signal.SIGUSR2)


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    if world.rank == 1:
        register_optimizer_step_post_hook(partial(break_tie, stops="stops" in job))
    run_job(job, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
