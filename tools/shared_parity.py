"""Compare architectures of the catalogue, whose parameters two ranks share, with the whole model of transformers."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers
from torch import distributed as dist
from torch import multiprocessing

from manifests.errors import UserError
from manifests.models.catalogue import CatalogueEntry
from runner.config.parallel_dims import ParallelDims
from runner.models.generic import Generic
from runner.parallel.mesh import Mesh, build_mesh
from runner.parallel.self_check import TOLERANCE, compare_shared
from runner.pipeline.self_check import Compared
from tools.tiny_models import tiny_config

Dim = Literal["tensor", "shard"]
Case = tuple[
    CatalogueEntry, Dim, Mapping[str, Any]
]  # an architecture, what the ranks share, and changes to its tiny config
_NUM_RANKS, _TIMEOUT = 2, timedelta(seconds=120)
_NO_PLAN = "transformers has no plan for its layers"


def why_not_tensor_parallel(entries: Collection[CatalogueEntry]) -> dict[str, str]:
    """Return why tensor-parallel ranks do not train each of these architectures, or nothing where they do."""
    planned = [entry for entry in entries if _has_plan(entry)]
    if not planned:
        return {entry.architecture: _NO_PLAN for entry in entries}
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        cases = [(entry, "tensor", {}) for entry in planned]
        multiprocessing.spawn(_rank, (f"file://{folder}/store", cases, out), nprocs=_NUM_RANKS)
        found = json.loads(out.read_text())
    reasons = {entry.architecture: why for entry, why in zip(planned, found, strict=True)}
    return {entry.architecture: reasons.get(entry.architecture, _NO_PLAN) for entry in entries}


def compare_all(cases: Iterable[Case], rank: int) -> Iterator[Compared | str]:
    """Compare each case on all ranks, which all call this; yield the reason where a model cannot be shared."""
    meshes: dict[Dim, Mesh] = {}
    for entry, dim, changes in cases:
        if dim not in meshes:
            degrees = ParallelDims(**{"pipeline": 1, dim: dist.get_world_size()})
            meshes[dim] = build_mesh(degrees, rank, torch.device("cpu"), _TIMEOUT)
        config = tiny_config(getattr(transformers, entry.architecture), **changes)
        try:
            yield compare_shared(Generic(entry, config.to_dict(), max_seq_len=1), meshes[dim])
        except UserError as error:
            yield error.problem
        except Exception as error:  # of modules that do not expect to have a part of their parameters
            yield f"by transformers' plan it fails with {type(error).__name__}"


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


def _has_plan(entry: CatalogueEntry) -> bool:
    config = getattr(transformers, entry.architecture).config_class
    if entry.section:
        config = type(getattr(config(), entry.section))
    return bool(config.base_model_tp_plan)
