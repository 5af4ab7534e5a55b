"""A rank that runs the toy family on every schedule and saves what came of it.

usage: nested_worker.py OUT
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.pipeline.chunk import build_chunks, materialize
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from tests.fast.runner.tiny import CPU, split_evenly
from tests.process.runner.pipeline.nested_cases import CUTS, SCHEDULES, Toy, batch_of, fill_by_name, placement_of


def run(name: str) -> list[dict[str, Any]]:
    """Give the losses and gradients of a batch of each shape, each shape twice."""
    family, placement = Toy(), placement_of(name)
    stage_modules = split_evenly(family.modules, placement.num_stages)
    chunks = build_chunks(family, stage_modules, placement.stages_on(dist.get_rank()))
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=torch.float32)
        fill_by_name(chunk.body)
    timetable = find_timetable(name, placement, CUTS[0].num_microbatches)
    schedule = build_schedule(timetable, chunks, plan_stage_metadata(family, stage_modules, torch.float32), CUTS[0])
    found = []
    for cut in CUTS * 2:
        for chunk in chunks:
            chunk.zero_grad()
        batch = batch_of[cut]
        loss = schedule.train(batch, cut)
        result = {"loss": loss if loss is None else loss.item(), "evaluated": schedule.evaluate(batch, cut)}
        parameters = (item for chunk in chunks for item in chunk.body.named_parameters())
        found.append(result | {"gradients": {key: p.grad.clone() for key, p in parameters if p.grad is not None}})
    return found


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.save({name: run(name) for name in SCHEDULES}, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
