"""A rank that trains every case of its world size and saves what came of it. Started by torchrun.

usage: parity_worker.py MODELS OUT
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.chunk import StageChunk, build_chunks, named_hf_parameters
from runner.families import family_for
from runner.norm import StepTotals
from runner.optim import Optimizer
from runner.schedule import build_schedule
from runner.step import Engine, eval_step, train_step
from runner.ties import build_ties, check_equal, lead_parameters
from runner.wire import plan_wire
from tests.fast.runner.tiny import CPU, fill, head_tie, padded_batch, read_config, split_evenly
from tests.process.parity_cases import BATCH, CASES, OPTIM, SEQ_LEN, STEPS, Case, cut

TIMEOUT = timedelta(seconds=60)


def run_case(case: Case, models: Path) -> dict[str, Any]:
    folder, placement = models / case.weights, case.placement
    family = family_for(read_config(folder), max_seq_len=SEQ_LEN)
    stage_modules = (
        cut(family.modules, case.shares) if case.shares else split_evenly(family.modules, placement.num_stages)
    )
    chunks = build_chunks(family, stage_modules, placement.stages_on(dist.get_rank()))
    fill(chunks, folder, case.dtype)
    groups = [head_tie(stage_modules)] if case.weights == "tied" else []
    ties = build_ties(groups, chunks, placement, TIMEOUT)
    check_equal(ties)
    parameters = lead_parameters(chunks, ties)
    schedule = build_schedule(case.schedule, chunks, plan_wire(family, stage_modules, case.dtype), placement, BATCH)
    if case.plant == "scale_grads":
        schedule.torch_schedule.scale_grads = True  # type: ignore[attr-defined]
    engine = Engine(
        schedule=schedule,
        ties=() if case.plant == "tie_not_summed" else ties,
        totals=StepTotals(parameters, () if case.plant == "tie_counted_twice" else ties, device=CPU),
        optimizer=Optimizer(parameters, OPTIM),
    )
    found: dict[str, Any] = {"stages": [chunk.stage for chunk in chunks], "losses": [], "norms": []}
    found |= {"gradients": [], "evals": [], "num_tokens": []}
    found["logits"] = schedule.logits(padded_batch(0).tokens)
    for step in range(STEPS):
        batch = padded_batch(step)
        needed = schedule.has_first or schedule.has_last
        found["evals"].append(eval_step(engine, batch if needed else None))
        report = train_step(engine, batch if needed else None, step)
        found["losses"].append(report.loss)
        found["norms"].append(report.grad_norm)
        found["num_tokens"].append(report.num_tokens)
        found["gradients"].append(_clone(chunks, gradients=True))
    found["parameters"] = _clone(chunks, gradients=False)
    if case.plant is None:
        check_equal(ties)
    return found


def _clone(chunks: tuple[StageChunk, ...], *, gradients: bool) -> dict[str, torch.Tensor]:
    """Copy what each name has; a tied member that another leads on this rank has no gradient."""
    named = [item for chunk in chunks for item in named_hf_parameters(chunk)]
    return {
        fqn: (parameter.grad if gradients else parameter.detach()).clone()  # type: ignore[union-attr]
        for fqn, parameter in named
        if not gradients or parameter.grad is not None
    }


def main(models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for case in CASES:
        if case.num_ranks == dist.get_world_size():
            found = run_case(case, models)
            (out / case.name).mkdir(exist_ok=True)
            torch.save(found, out / case.name / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
