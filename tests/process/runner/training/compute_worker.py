"""A rank that trains in many ways, each beside the plain one.

usage: compute_worker.py MODEL OUT spanning|rest|compiled

Each rank writes to OUT-RANK.json, for every case, how far its gradients are from the plain ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from manifests.placement import Placement
from runner.config.schema import ComputeOptions, OptimOptions
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, named_hf_parameters
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.training.activation_checkpoint import apply_compute_options
from runner.training.gradient_norm import StepTotals
from runner.training.mixed_precision import keep_masters, master_of, round_masters
from runner.training.optimizer import Optimizer
from runner.training.step import Engine, train_step
from runner.training.ties import build_ties, check_equal, lead_parameters
from tests.fast.runner.tiny import EMBEDDING, fill, head_tie, padded_batch, read_config, split_evenly
from tests.process.runner.training.compute_cases import ALL, BATCH, COMPILED, REST, SPANNING, STEPS, Case

TIMEOUT = timedelta(seconds=400)  # a first step that is compiled takes long
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Gradients = list[dict[str, torch.Tensor]]


def train(folder: Path, schedule: str, placement: Placement, options: ComputeOptions) -> Gradients:
    """Give the clipped gradients of every step, of what this rank steps."""
    rank = dist.get_rank() if placement.num_ranks > 1 else 0
    family = family_for(read_config(folder), max_seq_len=BATCH.seq_len)
    stage_modules = split_evenly(family.modules, placement.num_stages)
    chunks = build_chunks(family, stage_modules, placement.stages_on(rank))
    fill(chunks, folder, DTYPES[options.dtype])
    if options.has_masters:
        keep_masters(chunks, torch.float32)
        fill_masters(chunks, folder, stage_modules)
    # One process has no group to tie over: its members are all here.
    ties = build_ties([head_tie(stage_modules)], chunks, placement, TIMEOUT)
    check_equal(ties if placement.num_ranks > 1 else ())
    parameters = lead_parameters(chunks, ties)
    apply_compute_options(chunks, placement.num_stages, options)
    engine = Engine(
        schedule=build_schedule(
            find_timetable(schedule, placement, BATCH.num_microbatches),
            chunks,
            plan_stage_metadata(family, stage_modules, DTYPES[options.dtype]),
            BATCH,
        ),
        ties=ties,
        totals=StepTotals(parameters, ties, device=torch.device("cpu")),
        optimizer=Optimizer(parameters, OptimOptions(lr=1e-3, max_norm=0)),
    )
    gradients: Gradients = []
    for step in range(STEPS):
        train_step(engine, padded_batch(step, size=8, seq_len=BATCH.seq_len), step)
        gradients.append({fqn: p.grad.clone() for fqn, p in parameters if p.grad is not None})
    assert len(gradients[-1]) == len(parameters)
    return gradients


def fill_masters(chunks: tuple[StageChunk, ...], folder: Path, stage_modules: tuple[tuple[str, ...], ...]) -> None:
    whole = build_chunks(chunks[0].family, stage_modules, [chunk.stage for chunk in chunks])
    fill(whole, folder)
    for chunk, other in zip(chunks, whole, strict=True):
        for (_, parameter), (_, weight) in zip(named_hf_parameters(chunk), named_hf_parameters(other), strict=True):
            master_of(parameter).copy_(weight.detach())
        round_masters(chunk.parameters())


def distance(found: Gradients, expected: Gradients) -> float:
    """Give the largest of |a - b| / |b| over parameters and steps; 0: the same bits."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        for fqn, gradient in one.items():
            expected_one = other[fqn] if fqn in other else other[EMBEDDING]  # which leads in one process
            if not torch.equal(gradient, expected_one):
                worst = max(worst, float((gradient - expected_one).norm() / expected_one.norm()))
    return worst


def run(case: Case, folder: Path, plain: dict[str, Gradients]) -> Mapping[str, float]:
    if case.options.has_masters:
        alone = Placement(num_stages=1, num_ranks=1)
        if "mixed" not in plain:
            plain["mixed"] = train(folder, "GPipe", alone, case.options)
        expected = plain["mixed"]
    else:
        if case.schedule not in plain:
            plain[case.schedule] = train(folder, case.schedule, case.placement, ComputeOptions())
        expected = plain[case.schedule]
    found = train(folder, case.schedule, case.placement, case.options)
    # AdamW makes small differences large: where there may be some, only the first step counts.
    num_steps = 1 if case.tolerance else STEPS
    return {str(case): distance(found[:num_steps], expected[:num_steps])}


def main(folder: Path, out: Path, which: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    cases = {"spanning": SPANNING, "rest": REST, "compiled": COMPILED, "all": ALL}[which]
    plain: dict[str, Gradients] = {}
    found = {name: value for case in cases for name, value in run(case, folder, plain).items()}
    out.with_name(f"{out.name}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
