"""A rank that trains its part of each row, compared with one process that runs transformers' whole model.

usage: context_worker.py CASES OUT

CASES is a JSON list of cases. OUT/RANK.json gets the largest difference of the loss and of each gradient, by case.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.placement import Placement
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import ComputeOptions
from runner.data.sequences import Rows, rows_of
from runner.distributed.world import World, join_world
from runner.parallel.mesh import build_mesh
from runner.parallel.parallelize import Parallel, parallelize
from runner.proof.context import split_rows
from runner.training.activation_checkpoint import recompute_layers
from tests.fast.runner.pipeline.documents import CUT, SEQ_LEN, Alone

CPU = torch.device("cpu")


def run_case(case: dict[str, Any], world: World) -> tuple[float, dict[str, float]]:
    alone = Alone(case["architecture"], has_documents=case["documents"], **case["changes"])
    data = {"shard": case["shard"], "replicate": case["replicate"]}
    context = world.size // (case["pp"] * case["shard"] * case["replicate"])
    degrees = ParallelDims(pipeline=case["pp"], context=context, **data)
    mesh = build_mesh(degrees, world.rank, CPU, timedelta(seconds=60))
    if case["documents"]:
        alone.family.keep_documents()
    split_rows(alone.family, mesh, SEQ_LEN, case["method"])
    style = "v" if case["schedule"].startswith("ZBV") else "loop"
    placement = Placement(num_stages=case["pp"] * (2 if style == "v" else 1), num_ranks=case["pp"], style=style)
    chunks = alone.stages(placement, mesh.pipeline_rank, partial(parallelize, mesh=mesh, compute=ComputeOptions()))
    recompute_layers(chunks, case["ac"])
    parallel = Parallel(mesh=mesh, chunks=tuple(chunks), reduce_dtype=torch.float64, dtype=torch.float64)
    parallel.defer_gradient_sync()
    cut = replace(CUT, global_batch=CUT.global_batch // degrees.data, seq_len=SEQ_LEN // degrees.context)
    rows = rows_of(alone.packed(), Rows(number=mesh.data_rank, count=degrees.data))
    schedule = alone.schedule(case["schedule"], placement, chunks, cut, mesh.pipeline)
    loss = schedule.train(rows.part(mesh.context_rank, degrees.context))
    parallel.reduce_gradients()
    total = torch.tensor(loss or 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return abs(total.item() / alone.loss.item() - 1), alone.gradients(chunks)


def main(cases: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    world = World.from_environment(os.environ)
    join_world(CPU, timeout_s=300)
    found = [run_case(case, world) for case in json.loads(cases.read_text())]
    (out / f"{world.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
