"""A rank that trains a step of every case, and writes which collectives of experts each action runs, in order.

usage: collectives_worker.py CASES OUT

CASES is as in parallel_worker.py. OUT/NAME-RANK.json is a list of [stage, kind, microbatch]: one for each all-to-all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from runner.bundle.packed import open_packed
from runner.checkpoint.resume import Origin
from runner.config.flags import parse_training
from runner.distributed.world import World, join_world
from runner.pipeline.torch_runtime import RuntimeStage
from runner.setup import begin
from runner.training.step import train_step
from tests.fast.runner.tiny import padded_batch
from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE

CPU = torch.device("cpu")


class Collectives(TorchDispatchMode):
    """The action in which each all-to-all is run; those of no action have none."""

    def __init__(self) -> None:
        super().__init__()
        self.action: tuple[object, ...] = ()
        self.calls: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).partition(".")[2].startswith(("alltoall", "all_to_all")):
            self.calls.append(self.action)
        return func(*args, **(kwargs or {}))


def main(cases: Path, out: Path) -> None:
    world, log, timed = World.from_environment(os.environ), Collectives(), RuntimeStage._timed

    @contextmanager
    def labelled(stage: RuntimeStage, kind: Any, microbatch: int) -> Iterator[None]:
        log.action = (stage.stage_index, kind, microbatch)
        with timed(stage, kind, microbatch):
            yield
        log.action = ()

    RuntimeStage._timed = labelled  # type: ignore[method-assign]
    join_world(CPU, timeout_s=60)
    for case in json.loads(cases.read_text()):
        launched = open_packed(Path(case["root"]))
        options = parse_training(["--data", "synthetic", *case["args"]])
        ready = begin(launched, (Origin(folder=launched.root),), options, world, CPU)
        schedule, log.calls = ready.engine.schedule, []
        batch = ready.rows_of(padded_batch(0, vocab_size=VOCAB_SIZE))
        with log:
            train_step(ready.engine, batch if schedule.has_first or schedule.has_last else None, 0)
        (out / f"{case['name']}-{world.rank}.json").write_text(json.dumps(log.calls))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
