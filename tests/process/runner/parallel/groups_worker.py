"""A rank that takes a step of every case, and writes which groups run collectives before its schedule ends, and after.

usage: groups_worker.py CASES OUT

CASES is as in parallel_worker.py. OUT/NAME-RANK.json has the names of these groups.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.bundle.packed import open_packed
from runner.checkpoint.resume import Origin
from runner.config.flags import parse_training
from runner.distributed.world import World, join_world
from runner.profiling.trace import Recorder
from runner.setup import begin
from runner.training.step import train_step
from tests.fast.runner.tiny import padded_batch
from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE

CPU = torch.device("cpu")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single")


def main(cases: Path, out: Path) -> None:
    world, phases = World.from_environment(os.environ), [set[str]()]

    def recorded(collective: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        @wraps(collective)
        def record(*args: Any, **kwargs: Any) -> Any:
            group = signature.bind(*args, **kwargs).arguments.get("group") or dist.group.WORLD
            phases[-1].add(group.group_name)
            return collective(*args, **kwargs)

        return record

    stop = Recorder.stop
    Recorder.stop = lambda recorder: (stop(recorder), phases.append(set()))[0]  # type: ignore[method-assign]
    join_world(CPU, timeout_s=60)
    for name in COLLECTIVES:
        setattr(dist, name, recorded(getattr(dist, name)))
    for case in json.loads(cases.read_text()):
        phases[:] = [set()]
        launched = open_packed(Path(case["root"]))
        options = parse_training(["--data", "synthetic", *case["args"]])
        ready = begin(launched, (Origin(folder=launched.root),), options, world, CPU)
        schedule = ready.engine.schedule
        batch = ready.rows_of(padded_batch(0, vocab_size=VOCAB_SIZE))
        train_step(ready.engine, batch if schedule.has_first or schedule.has_last else None, 0)
        (out / f"{case['name']}-{world.rank}.json").write_text(json.dumps([*map(sorted, phases)]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
