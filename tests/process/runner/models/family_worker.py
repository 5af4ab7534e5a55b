"""A rank that trains cases as `runner.train` does, and saves what came of each.

usage: family_worker.py PLACE normal|slow|compiled
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.schema import TrainingState
from runner.bundle.packed import open_packed
from runner.checkpoint.resume import Origin
from runner.checkpoint.save import save
from runner.config.flags import parse_training
from runner.distributed.world import World, join_world
from runner.pipeline.chunk import hf_pieces
from runner.setup import begin
from runner.training.step import eval_counted, train_step
from tests.process.runner.models.family_cases import COMPILED, NORMAL, SLOW, STEPS, Case, batch_of, evaluated_batch
from tests.process.runner.training_jobs import COMPARED

CPU = torch.device("cpu")


def run_case(case: Case, place: Path, world: World) -> dict[str, Any]:
    launched = open_packed(case.folder(place, "packed"))
    is_compared = launched.manifest.model.architecture in COMPARED  # with one process, by the test
    options = parse_training([*case.flags, *(["--no-self-check"] if is_compared else [])])
    ready = begin(launched, (Origin(folder=launched.root),), options, world, CPU)
    schedule = ready.engine.schedule
    needed = schedule.has_first or schedule.has_last
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    num_tokens = 0
    for step in range(STEPS):
        report = train_step(ready.engine, ready.rows_of(batch_of(step)) if needed else None, step)
        found["losses"].append(report.loss)
        found["norms"].append(report.grad_norm)
        num_tokens += report.num_tokens
        if step == 0:
            pieces = (piece for chunk in ready.chunks for piece in hf_pieces(chunk, lambda weight: weight.grad))
            found["gradients"] = [(piece.fqn, piece.shape, piece.offset, piece.memory.clone()) for piece in pieces]
    evaluated = ready.rows_of(evaluated_batch()) if needed else None
    found["loss after"] = eval_counted(ready.engine, evaluated)[0]
    state = TrainingState(step=STEPS, num_tokens=num_tokens, dtype="F32")
    save(ready.held_weights(), ready.save_context, case.folder(place, "trained"), state)
    return found


def main(place: Path, cases: tuple[Case, ...]) -> None:
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=400)  # a first step that is compiled takes long
    for case in (case for case in cases if case.num_ranks == world.size):
        torch.save(run_case(case, place, world), case.folder(place, f"rank{world.rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"normal": NORMAL, "slow": SLOW, "compiled": COMPILED}[sys.argv[2]])
