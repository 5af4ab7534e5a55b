"""A rank that trains every case of its world size and saves what came of it: all but the slow ones, or a family's.

usage: parity_worker.py MODELS OUT normal|FAMILY
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.schedules.csvtext import write_csv
from runner.config.schema import BatchOptions
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, hf_constants, hf_pieces
from runner.pipeline.schedule import Lane, Pipeline, Purpose, Schedule, build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import Timetable, find_timetable
from runner.profiling.trace import Clock
from runner.training.gradient_norm import StepTotals
from runner.training.optimizer import Optimizer
from runner.training.step import Engine, eval_counted, train_step
from runner.training.ties import build_ties, check_equal, lead_parameters
from tests.fast.runner.models.decoders import fill_pieces
from tests.fast.runner.tiny import CPU, head_tie, read_config, split_evenly
from tests.process.runner.pipeline.parity_cases import (
    BATCH,
    COMPARED,
    EVALUATED,
    NORMAL,
    OPTIM,
    SEQ_LEN,
    SLOW,
    Case,
    batch_of,
    cut_modules,
    cut_of,
    folder_of,
)

TIMEOUT = timedelta(seconds=60)


def run_case(case: Case, models: Path, out: Path, rank: int) -> dict[str, Any]:
    folder, placement = folder_of(models, case.family, case.weights), case.placement
    family = family_for(read_config(folder), max_seq_len=SEQ_LEN)
    stage_modules = (
        cut_modules(family.modules, case.shares) if case.shares else split_evenly(family.modules, placement.num_stages)
    )
    chunks = build_chunks(family, stage_modules, placement.stages_on(rank))
    fill_pieces(chunks, folder, case.dtype)
    groups = [head_tie(stage_modules)] if case.weights == "tied" else []
    ties = build_ties(groups, chunks, placement, TIMEOUT)
    check_equal(ties)
    parameters = lead_parameters(chunks, ties)
    metadata, timetable = plan_stage_metadata(family, stage_modules, case.dtype), timetable_of(case, out)
    build = ThroughHost if case.is_through_host else build_schedule
    schedule: Schedule = build(timetable, chunks, metadata, BATCH)
    clock = Clock(timetable.planned(BATCH.num_microbatches), rank)
    engine = Engine(
        schedule=schedule,
        ties=ties,
        totals=StepTotals(parameters, ties, device=CPU, num_times=clock.num_times),
        optimizer=Optimizer(parameters, OPTIM),
        clock=clock,
    )
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "evals": [], "num_tokens": []}
    for step in range(case.steps):
        batch = batch_of(step, case.vocab_size) if schedule.has_first or schedule.has_last else None
        cut = cut_of(step)
        if step < EVALUATED:
            found["evals"].append(eval_counted(engine, batch, cut)[0])
        report = train_step(engine, batch, step, cut)
        found["losses"].append(report.loss)
        found["norms"].append(report.grad_norm)
        found["num_tokens"].append(report.num_tokens)
        if step < COMPARED:
            found["gradients"].append(gradients_of(chunks))
    found["parameters"] = {
        piece.fqn: piece.memory.clone() for chunk in chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))
    }
    check_equal(ties)
    return found


def timetable_of(case: Case, out: Path) -> Timetable:
    if not case.is_csv:
        return find_timetable(case.schedule, case.placement, BATCH.num_microbatches)
    path = out / f"{case.name}-{dist.get_rank()}.csv"
    path.write_text(write_csv(case.table))
    return find_timetable(str(path), case.placement, BATCH.num_microbatches)


class ThroughHost(Pipeline):
    """Stages that exchange tensors through the host's memory."""

    def build_lane(self, purpose: Purpose, cut: BatchOptions) -> Lane:
        lane = super().build_lane(purpose, cut)
        for stage in lane.stages:
            stage.is_through_host = True
        return lane


def gradients_of(chunks: tuple[StageChunk, ...]) -> dict[str, torch.Tensor]:
    """Copy the gradients by Hugging Face FQN; a tied member that another leads on this rank has none."""
    pieces = (piece for chunk in chunks for piece in hf_pieces(chunk, lambda weight: weight.grad))
    return {piece.fqn: piece.memory.clone() for piece in pieces}


def main(models: Path, out: Path, cases: tuple[Case, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for case in cases:
        if case.num_ranks == dist.get_world_size():
            save(run_case(case, models, out, dist.get_rank()), out / case.name)
    dist.barrier()
    dist.destroy_process_group()


def save(found: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    which = sys.argv[3]
    chosen = NORMAL if which == "normal" else tuple(case for case in SLOW if case.family == which)
    main(Path(sys.argv[1]), Path(sys.argv[2]), chosen)
