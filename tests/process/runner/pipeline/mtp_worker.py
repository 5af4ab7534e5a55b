"""A rank that trains tiny DeepSeek-V3 models with MTP layers on every case, and saves what came of it.

usage: mtp_worker.py OUT
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.models import model_shape
from runner.config.flags import parse_training
from runner.models import family_for
from runner.parallel.mesh import build_mesh
from runner.parallel.rows import keep_documents
from runner.pipeline.chunk import hf_constants, hf_pieces
from runner.pipeline.timetable import find_timetable
from runner.proof.float64 import float32_as_float64
from runner.training.build import Stages, build_engine, build_stages, ties_of
from runner.training.step import train_step
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
)


def run(case: Case) -> dict[str, Any]:
    options = parse_training([*FLAGS, "--ac", case.recompute])
    compute = replace(options.compute, dtype="fp64", master_dtype="fp64", reduce_dtype="fp64")
    options, config = replace(options, compute=compute), config_of(case.depth)
    mesh = build_mesh(options.degrees.resolve(2, 2), dist.get_rank(), CPU, timedelta(seconds=60))
    family = family_for(config, max_seq_len=SEQ_LEN, implementation="transformers", shape=model_shape(config))
    family.mtp_weight = options.loss.mtp_weight
    family._config._experts_implementation = "eager"
    if case.has_documents:
        keep_documents(family, SEQ_LEN)
    stages = Stages(modules=case.stage_modules, placement=case.placement, ties=())
    chunks = build_stages(family, stages, compute, mesh, CPU, (lambda fqn: True) if case.is_chosen else None)
    weights = random_weights(case.depth)
    with torch.no_grad():
        for piece in (piece for chunk in chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))):
            sizes = zip(piece.offset, piece.memory.shape, strict=True)
            piece.memory.copy_(weights[piece.fqn][tuple(slice(low, low + size) for low, size in sizes)])
    check_loaded(ties_of(family, stages), chunks)
    timetable = find_timetable(case.schedule, case.placement, CUT.num_microbatches)
    engine = build_engine(stages, chunks, options, timetable, mesh, CUT)
    reports = [train_step(engine, case.batch(step), step) for step in range(NUM_STEPS)]
    check_equal(engine.ties)

    def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        return parameter.grad if engine.optimizer.steps(parameter) else None

    return {
        "losses": [(report.loss, report.mtp_loss) for report in reports],
        "gradients": [(p.fqn, p.memory.clone()) for chunk in chunks for p in hf_pieces(chunk, gradient_of)],
        "weights": [(p.fqn, p.memory.clone()) for chunk in chunks for p in (*hf_pieces(chunk), *hf_constants(chunk))],
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with float32_as_float64():
        results = {name: run(case) for name, case in CASES.items()}
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
