"""Compare architectures of the catalogue, whose parameters two ranks share, with the whole model of transformers."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers
from torch import distributed as dist
from torch import multiprocessing

from manifests.errors import UserError
from manifests.models.catalogue import CatalogueEntry
from manifests.placement import Placement
from runner.config.flags import parse_training
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import ComputeOptions
from runner.models.generic import Generic
from runner.models.tensor_plan import PLANS
from runner.parallel.mesh import Mesh, build_mesh
from runner.parallel.parallelize import Parallel, parallelize
from runner.pipeline.timetable import Timetable
from runner.proof.combination import Combination
from runner.proof.proving import compare
from runner.proof.stages import (
    Compared,
    SelfChecked,
    build_filled,
    difference,
    gradients_of,
    loss_difference,
    run_tiny,
)
from runner.training.build import Stages
from tools.tiny_models import tiny_config

Dim = Literal["tensor", "shard", "expert", "context"]
Case = tuple[
    CatalogueEntry, Dim, Mapping[str, Any]
]  # an architecture, what the ranks share, and changes to its tiny config
# What transformers computes in float32 whatever the weights are, such as linear attention, differs by 1e-6; what a plan
# leaves out, by far more.
TOLERANCE = 1e-5
_SEED = 0  # of the weights, on all ranks
_NUM_RANKS, _TIMEOUT = 2, timedelta(seconds=120)
_NO_PLAN = "transformers has no plan for its layers"


def why_not_tensor_parallel(entries: Collection[CatalogueEntry]) -> dict[str, str]:
    """Return why tensor-parallel ranks do not train each of these architectures, or nothing where they do."""
    planned = [entry for entry in entries if _config_class(entry).base_model_tp_plan or _is_planned_here(entry)]
    reasons = _compare(planned, "tensor")
    return {entry.architecture: reasons.get(entry.architecture, _NO_PLAN) for entry in entries}


def expert_parallel(entries: Collection[CatalogueEntry]) -> tuple[str, ...]:
    """Return those of these architectures that ranks train with different experts on each of them."""
    reasons = _compare([entry for entry in entries if _config_class(entry).base_model_ep_plan], "expert")
    return tuple(architecture for architecture, why in reasons.items() if not why)


def refusing_cp(entries: Sequence[CatalogueEntry]) -> tuple[str, ...]:
    """Return those of these architectures that ranks with parts of each row train otherwise than one process."""
    return tuple(architecture for architecture, why in _compare(entries, "context").items() if why)


def _compare(entries: Sequence[CatalogueEntry], dim: Dim) -> dict[str, str]:
    """Return why ranks that share a dimension do not train each of these architectures, or nothing where they do."""
    if not entries:
        return {}
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        cases = [(entry, dim, {}) for entry in entries]
        args = (f"file://{folder}/store", cases, out)
        multiprocessing.start_processes(_rank, args, nprocs=_NUM_RANKS, start_method="forkserver")
        found = json.loads(out.read_text())
    return {entry.architecture: why for entry, why in zip(entries, found, strict=True)}


def compare_all(cases: Iterable[Case], rank: int) -> Iterator[Compared | str]:
    """Compare each case on all ranks, which all call this; yield the reason where a model cannot be shared."""
    meshes: dict[Dim, Mesh] = {}
    for entry, dim, changes in cases:
        size = dist.get_world_size()
        if dim == "context":
            yield _compare_parts(entry, size)
            continue
        if dim not in meshes:
            degrees = ParallelDims(**{"pipeline": 1, dim: size, "shard" if dim == "expert" else dim: size})
            meshes[dim] = build_mesh(degrees, rank, torch.device("cpu"), _TIMEOUT)
        config = tiny_config(getattr(transformers, entry.architecture), **changes)
        # Rows of several ranks go through an expert in another order: exact in float64, if FSDP takes the model in it.
        dtypes = (torch.float64, torch.float32) if dim == "expert" else (None,)
        results = list[Compared | str]()
        for dtype in dtypes:
            try:
                results.append(compare_shared(Generic(entry, config.to_dict(), max_seq_len=1), meshes[dim], dtype))
                break
            except UserError as error:
                is_compared = error.code != "model.no-self-check"
                results.append(error.problem if is_compared else "no tiny model of it could be compared")
            except Exception as error:  # of modules that do not expect to have a part of their parameters
                results.append(f"by transformers' plan it fails with {type(error).__name__}")
        yield results[-1]


def compare_shared(family: SelfChecked, mesh: Mesh, dtype: torch.dtype | None = None) -> Compared:
    """Compare a tiny model, whose parameters the ranks of a mesh share, with the whole of it.

    Tensor-parallel ranks do so in float64: their sums are in another order, and in float32 that is more than 1e-6.
    FSDP does not in float64 where a model keeps some parameters in float32.

    Raises:
        Exception: whatever a model raises that cannot be shared like that.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        dtype = dtype or (torch.float64 if mesh.degrees.tensor > 1 else torch.float32)
        tiny = run_tiny(family, dtype)
        share = partial(parallelize, mesh=mesh, compute=ComputeOptions())
        (chunk,) = build_filled(tiny.family, tiny.whole, (tiny.family.modules,), share)
        chunk.io = None  # nothing crosses to other stages; logits may be in float32
        parallel = Parallel(mesh=mesh, chunks=(chunk,), reduce_dtype=dtype, dtype=dtype)
        parallel.defer_gradient_sync()
        rank_results = tiny.results[mesh.data_rank :: mesh.degrees.data]
        crossed = [(chunk(result.tokens), result) for result in rank_results]
        for logits, result in crossed:
            torch.autograd.backward(logits, result.towards)
        parallel.reduce_gradients()
    return Compared(
        logits=max(difference(logits.detach(), result.logits) for logits, result in crossed),
        loss=max(loss_difference((chunk,), logits.detach(), result) for logits, result in crossed),
        gradients=max(difference(gradient, expected) for _, expected, gradient in gradients_of(tiny.whole, (chunk,))),
    )


def _compare_parts(entry: CatalogueEntry, size: int) -> Compared | str:
    """Compare a step of ranks with parts of rows as a run does before step 1; all ranks call this."""
    options = parse_training(["--data", "synthetic", "--global-batch", str(size), "--cp", str(size)])
    placement = Placement(num_stages=1, num_ranks=1)
    try:
        config = tiny_config(getattr(transformers, entry.architecture), tie_word_embeddings=False)
        config.get_text_config().tie_word_embeddings = False
        family = Generic(entry, config.to_dict(), max_seq_len=1)
        stages = Stages(modules=(family.modules,), placement=placement, ties=())
        run = Combination(
            family=family, stages=stages, timetable=Timetable(name="1F1B", placement=placement),
            degrees=options.degrees.resolve(1, size), options=options,
        )  # fmt: skip
        distances, problem = compare(run)
    except UserError as error:
        return error.problem
    if distances is None or problem:
        return problem or "a rank failed"
    return Compared(logits=0.0, loss=distances.loss, gradients=distances.largest["gradient"])


def _rank(rank: int, address: str, cases: Sequence[Case], out: Path) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=_NUM_RANKS, timeout=_TIMEOUT)
    found = [_reason(each) for each in compare_all(cases, rank)]
    everyone: list[list[str]] = [[] for _ in range(_NUM_RANKS)]
    dist.all_gather_object(everyone, found)
    if rank == 0:
        out.write_text(json.dumps([max(both) for both in zip(*everyone, strict=True)]))
    dist.destroy_process_group()


def _reason(found: Compared | str) -> str:
    if isinstance(found, str):
        return found
    return "" if found.largest <= TOLERANCE else "sharded by transformers' plan it computes something else"


def _config_class(entry: CatalogueEntry) -> Any:
    config = getattr(transformers, entry.architecture).config_class
    return type(getattr(config(), entry.section)) if entry.section else config


def _is_planned_here(entry: CatalogueEntry) -> bool:
    return _config_class(entry).model_type in PLANS
