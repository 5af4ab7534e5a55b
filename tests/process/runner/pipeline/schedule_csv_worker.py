"""A rank that runs one step from every CSV in a folder and saves its stages' gradients.

usage: schedule_csv_worker.py FOLDER
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from manifests.placement import Placement
from manifests.schedules.actions import Table
from manifests.schedules.csvtext import read_csv
from manifests.schedules.tables import schedule_table

WIDTH, ROWS = 8, 3  # ROWS of each microbatch
SINGLE = Placement(num_stages=2, num_ranks=2)
LOOP = Placement(num_stages=4, num_ranks=2)
V = Placement(num_stages=4, num_ranks=2, style="v")
TABLES = {
    "megatron": schedule_table("Interleaved1F1B", LOOP, 5, microbatch_group=3),
    **{name: schedule_table(name, SINGLE, 6) for name in ("GPipe", "1F1B")},
    **{name: schedule_table(name, LOOP, 6) for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")},
    **{name: schedule_table(name, V, 6) for name in ("ZBVZeroBubble", "DualPipeV")},
}


def build_stage(stage: int) -> nn.Module:
    """Give a stage whose weights depend on nothing but its number."""
    generator = torch.Generator().manual_seed(stage)
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return nn.Sequential(layer, nn.Tanh())


def build_batch(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give inputs and targets of a whole step; every row differs."""
    generator = torch.Generator().manual_seed(100)
    inputs, targets = (torch.randn(num_microbatches * ROWS, WIDTH, generator=generator) for _ in range(2))
    return inputs, targets


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets, reduction="sum")


def read_table(path: Path) -> Table:
    """Read NAME.compute_only.csv or NAME.compute_comms.csv."""
    return read_csv(path.read_text(), path.name, TABLES[path.name.split(".")[0]].placement)


def run(path: Path) -> dict[int, list[torch.Tensor]]:
    table = read_table(path)
    example = torch.empty(ROWS, WIDTH)
    stages = [
        PipelineStage(
            build_stage(stage),
            stage,
            table.placement.num_stages,
            torch.device("cpu"),
            input_args=example.clone().requires_grad_(stage > 0),
            output_args=example.clone().requires_grad_(),
        )
        for stage in table.placement.stages_on(dist.get_rank())
    ]
    schedule: Any = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        stages, table.num_microbatches, loss_fn=loss_of, scale_grads=False
    )
    schedule._load_csv(str(path), format=path.suffixes[0].removeprefix("."))
    inputs, targets = build_batch(table.num_microbatches)
    args = (inputs,) if any(stage.is_first for stage in stages) else ()
    schedule.step(*args, target=targets if any(stage.is_last for stage in stages) else None)
    return {stage.stage_index: [p.grad for p in stage.submod.parameters() if p.grad is not None] for stage in stages}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {path.name: run(path) for path in sorted(folder.glob("*.csv"))}
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
