"""A rank that trains the adapters of cases as `runner.train` does, and saves what came of each.

usage: adapters_worker.py PLACE normal|slow
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.bundle.packed import open_packed
from runner.checkpoint.peft_folder import save_peft
from runner.checkpoint.resume import Origin
from runner.config import memory
from runner.config.flags import parse_training
from runner.distributed.world import World, join_world
from runner.models.generic import Generic
from runner.pipeline.chunk import hf_pieces
from runner.setup import begin
from runner.training.step import train_step
from tests.process.runner.training.adapter_cases import NORMAL, SLOW, STEPS, Case, batch_of, flags_of

CPU = torch.device("cpu")
memory._NBYTES["fp64"] = 8  # of which no run has plans


def run_case(case: Case, place: Path, world: World) -> dict[str, Any]:
    launched = open_packed(case.folder(place, "packed"))
    options = parse_training(flags_of(case, place))
    dtype: Any = case.dtype
    compute = replace(options.compute, dtype=dtype, master_dtype=dtype, reduce_dtype=dtype)
    origin = Origin(folder=launched.root)
    ready = begin(launched, (origin,), replace(options, compute=compute), world, CPU)
    schedule = ready.engine.schedule
    needed = schedule.has_first or schedule.has_last
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        report = train_step(ready.engine, ready.rows_of(batch_of(step)) if needed else None, step)
        result["losses"].append(report.loss)
        result["norms"].append(report.grad_norm)
        pieces = (piece for chunk in ready.chunks for piece in hf_pieces(chunk, lambda weight: weight.grad))
        result["gradients"].append([(piece.fqn, piece.offset, piece.memory.clone()) for piece in pieces])
    frozen = [weight for chunk in ready.chunks for weight in chunk.parameters() if not weight.requires_grad]
    result["frozen gradients"] = sum(weight.grad is not None for weight in frozen)
    result["stepped"] = [fqn for fqn, _ in ready.engine.optimizer.parameters]
    weights, context = ready.whole_weights()
    family = ready.chunks[0].family
    assert isinstance(family, Generic)
    assert family.adapters is not None
    with counting_messages() as counts:
        save_peft(
            weights, family.adapters, context.adapters, case.folder(place, "trained"), pipeline=ready.mesh.pipeline
        )
    result["messages"] = counts
    return result


@contextmanager
def counting_messages() -> Iterator[list[int]]:
    """Count the messages that a rank gets in each gather, every one of which takes the memory of the longest."""
    gather, counts = dist.gather_object, list[int]()

    def counted(value: Any, values: list[Any] | None = None, **of: Any) -> None:
        counts.append(len(values or ()))
        gather(value, values, **of)

    dist.gather_object = counted
    try:
        yield counts
    finally:
        dist.gather_object = gather


def main(place: Path, cases: tuple[Case, ...]) -> None:
    torch.set_num_threads(1)
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=300)
    for case in (case for case in cases if case.num_ranks == world.size):
        torch.save(run_case(case, place, world), case.folder(place, f"rank{world.rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"normal": NORMAL, "slow": SLOW}[sys.argv[2]])
