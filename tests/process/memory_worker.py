"""A rank that trains one case for two steps and counts what it holds.

usage: memory_worker.py CASE OUT
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from runner.config.schema import OptimOptions
from runner.distributed.world import join_world
from runner.models import family_for
from runner.pipeline.chunk import build_chunks, materialize, named_hf_parameters
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.training.gradient_norm import StepTotals
from runner.training.mixed_precision import keep_masters, kept, round_masters
from runner.training.optimizer import Optimizer
from runner.training.step import Engine, train_step
from runner.training.ties import build_ties, lead_parameters
from tests.fast.runner.tiny import CPU, head_tie, padded_batch
from tests.process.memory_cases import CASES, ONE_GB, Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.bfloat16}
TIMEOUT = timedelta(seconds=60)


def measure(case: Case) -> dict[str, int]:
    """Give the bytes held at the end of the second step's last backward pass, and the most that ever were."""
    dtype, placement, sizes = DTYPES[case.policy], case.placement, case.batch
    family = family_for(case.config, max_seq_len=sizes.seq_len)
    chunks = build_chunks(family, case.stages, placement.stages_on(dist.get_rank()))
    before, low = resident_nbytes(), status_nbytes("VmRSS")  # everything is imported, and the modules are on meta
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=dtype)
    if case.policy == "mixed":
        keep_masters(chunks, torch.float32)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        torch.nn.init.normal_(kept(parameter), std=0.02)
    round_masters(parameter for chunk in chunks for parameter in chunk.parameters())
    ties = build_ties([head_tie(case.stages)], chunks, placement, TIMEOUT)
    parameters = lead_parameters(chunks, ties)
    timetable = find_timetable(case.schedule, placement, sizes.num_microbatches)
    engine = Engine(
        schedule=build_schedule(timetable, chunks, plan_stage_metadata(family, case.stages, dtype), sizes),
        ties=ties,
        totals=StepTotals(parameters, ties, device=CPU),
        optimizer=Optimizer(parameters, OptimOptions(lr=1e-3)),
    )
    batch = padded_batch(0, size=sizes.global_batch, seq_len=sizes.seq_len)
    train_step(engine, batch, 0)
    engine.optimizer.zero_gradients()
    engine.schedule.train(batch)
    held = [parameter for chunk in chunks for _, parameter in named_hf_parameters(chunk)]
    masters = [kept(parameter) for parameter in held if kept(parameter) is not parameter]
    states = engine.optimizer.adamw.state.values() if engine.optimizer.adamw else ()
    return {
        "weights": nbytes_of(held),
        "gradients": nbytes_of(parameter.grad for parameter in held if parameter.grad is not None),
        "optimizer": nbytes_of([*masters, *(tensor for state in states for tensor in state.values())]),
        "resident": resident_nbytes() - before,
        "peak": status_nbytes("VmHWM") - low,
    }


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Give the bytes of all storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def resident_nbytes() -> int:
    """Give the anonymous memory of this process, less what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return status_nbytes("RssAnon")


def status_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(name: str, out: Path) -> None:
    torch.set_num_threads(1)
    join_world(CPU, int(TIMEOUT.total_seconds()))
    case = next(case for case in (*CASES, ONE_GB) if case.name == name)
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(measure(case)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
