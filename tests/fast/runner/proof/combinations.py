"""Combinations to prove: a tiny config of an architecture, its stages, and the flags of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from manifests.models import model_shape
from manifests.models.catalogue import entry_of
from manifests.placement import Placement
from manifests.schedules.rules import default_schedule
from manifests.schema import TieGroup, TieMember
from runner.config.flags import parse_training
from runner.config.parallel_dims import ParallelDims
from runner.models.generic import Generic
from runner.parallel.parallelize import keep_documents
from runner.pipeline.timetable import find_timetable
from runner.proof.combination import Combination
from runner.training.algorithms import plan_groups
from runner.training.build import Stages
from tests.fast.manifests.models.catalogued import config_of, quiet, stored_by
from tests.fast.runner.tiny import split_evenly


def combination(
    architecture: str, pp: int = 1, *flags: str, schedule: str | None = None, vpp: int = 1, **changes: Any
) -> Combination:
    """Return a combination of these flags on all ranks, with the rest of them as data-parallel ones."""
    entry = entry_of(architecture)
    assert entry is not None
    with quiet():
        config = {**config_of(architecture).to_dict(), **changes}
        family = Generic(entry, {**config, "architectures": [architecture]}, max_seq_len=1)
    run = combine(family, ties_of, pp, *flags, schedule=schedule, vpp=vpp)
    if run.options.optim.optimizer is None:
        return run
    document, stored = stored_by(architecture, **changes)
    options, _ = plan_groups(run.options, model_shape(document, stored=stored), None, "")
    return replace(run, options=options)


def combine(
    family: Any,
    find_ties: Callable[[Any, tuple[tuple[str, ...], ...]], tuple[TieGroup, ...]],
    pp: int,
    *flags: str,
    schedule: str | None = None,
    vpp: int = 1,
) -> Combination:
    words = ["--data", "synthetic", "--global-batch", "16", "--timeout", "120"]
    options = parse_training([*words, *(flag for flag in flags if flag != "--document-mask")])
    degrees: ParallelDims = options.degrees.resolve(pp, dist.get_world_size())
    has_documents = "--document-mask" in flags
    if has_documents:
        keep_documents(family, 1)
    style = "v" if schedule in ("ZBVZeroBubble", "DualPipeV") else "loop"
    placement = Placement(num_stages=pp * (2 if style == "v" else vpp), num_ranks=pp, style=style)
    count = options.batch.num_microbatches // degrees.data
    modules = split_evenly(family.modules, placement.num_stages)
    return Combination(
        family=family,
        stages=Stages(modules=modules, placement=placement, ties=find_ties(family, modules)),
        timetable=find_timetable(schedule or default_schedule(placement), placement, count),
        degrees=degrees,
        options=options,
        has_documents=has_documents,
    )


def ties_of(family: Generic, stage_modules: tuple[tuple[str, ...], ...]) -> tuple[TieGroup, ...]:
    """Return the tie groups that packing finds in an architecture's entry, if the config ties weights."""

    def member(fqn: str) -> TieMember:
        homes = (
            stage for stage, names in enumerate(stage_modules) if any(fqn.startswith(f"{name}.") for name in names)
        )
        return TieMember(fqn=fqn, stage=next(homes))

    if not family._is_tied:
        return ()
    return tuple(TieGroup(owner=member(owner), replicas=(member(replica),)) for owner, replica in family._entry.ties)
