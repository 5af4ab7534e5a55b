"""A rank that trains every case it is given for two steps, and writes what it held beside what was planned.

usage: memory_worker.py CASES OUT

CASES is a JSON list of {"name": …, "root": …, "policy": …, "args": […]}.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.bundle.packed import open_packed
from runner.checkpoint.resume import Origin
from runner.config.flags import parse_training
from runner.config.memory import planned_memory
from runner.distributed.world import World, join_world
from runner.setup import Ready, begin
from runner.tensors.dtensor import local_of
from runner.training.mixed_precision import master_of
from runner.training.step import train_step
from tests.fast.runner.tiny import CPU, padded_batch


def run_case(case: dict[str, Any], world: World) -> dict[str, Any]:
    launched = open_packed(Path(case["root"]))
    options = parse_training(["--data", "synthetic", "--no-self-check", "--allocator", case["policy"], *case["args"]])
    low = resident_nbytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    ready = begin(launched, (Origin(folder=launched.root),), options, world, CPU)
    engine, schedule, sizes = ready.engine, ready.engine.schedule, options.batch
    vocab_size = ready.chunks[0].family.vocab_size
    for step in range(2):
        batch = padded_batch(step, size=sizes.global_batch, seq_len=sizes.seq_len, vocab_size=vocab_size)
        rows = ready.rows_of(batch) if schedule.has_first or schedule.has_last else None
        train_step(engine, rows, step)
    planned = planned_memory(
        launched.shape,
        launched.stage_modules,
        ready.engine.clock.table,
        options,
        ready.mesh.degrees,
        host_memory=options.host_memory,
    ).ranks[ready.mesh.pipeline_rank]
    return {
        "planned": {**asdict(planned), "total": planned.total},
        "peak": status_nbytes("VmHWM") - low,
        **state_nbytes(ready),
    }


def state_nbytes(ready: Ready) -> dict[str, int]:
    """Give the bytes of weights, gradients and optimizer state after a step, as this rank has them."""
    parameters = [parameter for chunk in ready.chunks for parameter in chunk.parameters()]
    optimizers = ready.engine.optimizer.torch_optimizers
    states = [tensor for each in optimizers for state in each.state.values() for tensor in state.values()]
    masters = [master_of(parameter) for parameter in parameters if master_of(parameter) is not parameter]
    return {
        "weights": nbytes_of(parameters),
        "gradients": nbytes_of(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": nbytes_of([*masters, *states]),
    }


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Give the bytes of all storages, each counted once."""
    storages = (local_of(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def resident_nbytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_nbytes("VmRSS")


def status_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(cases: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=60)
    for case in json.loads(cases.read_text()):
        (out / f"{case['name']}-{world.rank}.json").write_text(json.dumps(run_case(case, world)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
