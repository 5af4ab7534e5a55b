"""A rank that trains tiny DeepSeek-V3 models with MTP layers on these cases, and saves what came of it.

usage: mtp_worker.py OUT CASE...
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.config.flags import parse_training
from runner.data.sequences import Batch, Rows, rows_of
from runner.models import family_for
from runner.parallel.mesh import build_mesh
from runner.parallel.parallelize import keep_documents, split_rows
from runner.pipeline.chunk import hf_constants, hf_pieces
from runner.pipeline.timetable import find_timetable
from runner.proof.tiny_step import float32_as_float64
from runner.tensors.local_shard import Piece
from runner.training.build import Stages, build_engine, build_stages, ties_of
from runner.training.step import eval_counted, train_step
from runner.training.ties import check_equal, check_loaded
from tests.fast.runner.tiny import CPU
from tests.process.runner.pipeline.mtp_oracle import (
    CASES,
    CUT,
    FLAGS,
    NUM_STEPS,
    SEQ_LEN,
    Case,
    config_of,
    random_weights,
    shape_of,
)


def run(case: Case) -> dict[str, Any]:
    options = parse_training([*FLAGS, "--ac", case.recompute, *case.flags])
    compute = replace(options.compute, dtype="fp64", master_dtype="fp64", reduce_dtype="fp64")
    options, config = replace(options, compute=compute), config_of(case.depth, beside=case.beside)
    degrees = options.degrees.resolve(2, dist.get_world_size())
    mesh = build_mesh(degrees, dist.get_rank(), CPU, timedelta(seconds=60))
    family = family_for(config, max_seq_len=SEQ_LEN, shape=shape_of(case.depth, beside=case.beside))
    family.mtp_weight = options.loss.mtp_weight
    family._config._experts_implementation = "eager"
    if case.has_documents:
        keep_documents(family, SEQ_LEN)
    if degrees.context > 1:
        split_rows(family, mesh, options.degrees.context_method)
    stages = Stages(modules=case.stage_modules, placement=case.placement, ties=())
    chunks = build_stages(family, stages, compute, mesh, CPU, (lambda fqn: True) if case.is_chosen else None)
    weights = random_weights(case.depth, beside=case.beside)
    with torch.no_grad():
        for piece in (piece for chunk in chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))):
            piece.memory.copy_(weights[piece.fqn][piece.part.index])
    check_loaded(ties_of(family, stages), chunks)
    cut = replace(CUT, global_batch=CUT.global_batch // degrees.data, seq_len=SEQ_LEN // degrees.context)
    timetable = find_timetable(case.schedule, case.placement, cut.num_microbatches)
    engine = build_engine(stages, chunks, options, timetable, mesh, cut)

    def rows(step: int) -> Batch:
        rows = rows_of(case.batch(step), Rows(number=mesh.data_rank, count=degrees.data))
        return rows.part(mesh.context_rank, degrees.context)

    evaluated, reports = [], []
    for step in range(NUM_STEPS):
        evaluated.append(eval_counted(engine, rows(step))[0])
        reports.append(train_step(engine, rows(step), step))
    check_equal(engine.ties)

    def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        return parameter.grad if engine.optimizer.steps(parameter) else None

    return {
        "losses": [(report.loss, report.mtp_loss) for report in reports],
        "evaluated": evaluated,
        "gradients": saved(piece for chunk in chunks for piece in hf_pieces(chunk, gradient_of)),
        "weights": saved(piece for chunk in chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))),
    }


def saved(pieces: Iterable[Piece]) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    return [(piece.fqn, piece.part.index, piece.memory.clone()) for piece in pieces]


def main(out: Path, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with float32_as_float64():
        results = {name: run(CASES[name]) for name in names}
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
