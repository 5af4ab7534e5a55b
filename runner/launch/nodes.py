"""Which ranks sit on which node, and which stages they hold. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from manifests.errors import LaunchError, UsageError
from manifests.schema import Manifest
from runner.config.parallel_dims import Degrees

__all__ = ["NodePlan", "check_groups", "check_memory", "check_ranks", "parse_nnodes", "plan_nodes", "printed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """The ranks of one node, `first` to `last`, and the stages that they hold."""

    node: int
    first: int
    last: int
    stages: tuple[int, ...]


def parse_nnodes(text: str) -> int:
    """Read a number of nodes.

    Raises:
        UsageError: a range, or no number: the stages of a manifest need a fixed number of ranks.
    """
    if re.fullmatch(r"0*[1-9][0-9]{0,4}", text, re.ASCII):
        return int(text)
    hint = "every rank has its stages: a job cannot grow or shrink while it runs" if ":" in text else ""
    raise UsageError("--nnodes", f"expected one number from 1 to 99999, found {text!r}", hint, code="launch.nodes")


def check_ranks(num_pipeline_ranks: int, nnodes: int, nproc_per_node: int) -> None:
    """Raise unless so many nodes of so many ranks can be dealt out to the pipeline ranks of a manifest.

    Raises:
        InputError: naming the nearest numbers that can.
    """
    world_size = nnodes * nproc_per_node
    if world_size % num_pipeline_ranks == 0:
        return
    ranks = _nearest(nproc_per_node, num_pipeline_ranks // math.gcd(num_pipeline_ranks, nnodes))
    nodes = _nearest(nnodes, num_pipeline_ranks // math.gcd(num_pipeline_ranks, nproc_per_node))
    raise LaunchError(
        "",
        f"manifest needs {num_pipeline_ranks} ranks, or a multiple of them, and {nnodes} nodes with {nproc_per_node} "
        f"each are {world_size}",
        f"take --nproc-per-node {ranks} or --nnodes {nodes}, or reshard pack MANIFEST --layout pp={world_size} "
        "--out DIR",
        code="launch.world-size",
    )


def check_groups(degrees: Degrees, nnodes: int, nproc_per_node: int) -> tuple[str, ...]:
    """Give a sentence for each kind of ranks that would work closely together and do not share a node.

    Raises:
        UsageError: a node's ranks would be cut in the middle of a tensor-parallel group that fits it.
    """
    tensor, per_stage = degrees.tensor, degrees.per_stage
    if nnodes == 1:
        return ()
    if tensor > nproc_per_node:
        return (
            f"the {tensor} ranks of each tensor-parallel group are on several nodes, and talk in every layer: "
            f"--tp {math.gcd(tensor, nproc_per_node)} keeps them on one",
        )
    if nproc_per_node % tensor:
        raise UsageError(
            "--nproc-per-node",
            f"{nproc_per_node} ranks on a node cut a tensor-parallel group of {tensor} in two, and its ranks talk in "
            "every layer",
            f"take a multiple of --tp {tensor}: {_nearest(nproc_per_node, tensor)}",
            code="launch.split-tp-group",
        )
    if per_stage > nproc_per_node or nproc_per_node % per_stage == 0:
        return ()
    split = next(
        first for first in range(0, nnodes * nproc_per_node, per_stage) if _is_cut(first, degrees, nproc_per_node)
    )
    fits = [count for count in range(per_stage, nnodes * nproc_per_node + 1, per_stage)
            if nnodes * nproc_per_node % count == 0]  # fmt: skip
    best = min(fits, key=lambda count: (abs(count - nproc_per_node), count))
    return (
        f"ranks {split}-{split + per_stage - 1} hold the same stages and are on two nodes, although {per_stage} fit "
        f"one: --nnodes {nnodes * nproc_per_node // best} --nproc-per-node {best} keeps them together",
    )


def _is_cut(first: int, degrees: Degrees, nproc_per_node: int) -> bool:
    return first // nproc_per_node != (first + degrees.per_stage - 1) // nproc_per_node


def _nearest(found: int, unit: int) -> str:
    """Give the multiples of `unit` on both sides of a number."""
    lower = found // unit * unit
    return f"{lower} or {lower + unit}" if lower else str(unit)


def plan_nodes(manifest: Manifest, nnodes: int, nproc_per_node: int) -> tuple[NodePlan, ...]:
    """Give the nodes of a job. Ranks of one stage are neighbours, and so are neighbouring stages."""
    placement, world_size = manifest.placement, nnodes * nproc_per_node
    each = max(1, world_size // placement.num_ranks)  # ranks that hold the same stages

    def stages_of(first: int, last: int) -> Iterator[int]:
        for pipeline_rank in range(first // each, min(last // each + 1, placement.num_ranks)):
            yield from placement.stages_on(pipeline_rank)

    plans = []
    for node in range(nnodes):
        first, last = node * nproc_per_node, (node + 1) * nproc_per_node - 1
        plans.append(NodePlan(node=node, first=first, last=last, stages=tuple(sorted(stages_of(first, last)))))
    return tuple(plans)


def printed(plans: tuple[NodePlan, ...]) -> str:
    """Give a line for each node."""
    return "\n".join(
        f"node {plan.node}: ranks {plan.first}-{plan.last}, stages {', '.join(map(str, plan.stages))}" for plan in plans
    )


def _digits(gib: float) -> int:
    """Give after how many digits a size is told from nothing."""
    return 1 if gib >= 0.1 else 2 - math.floor(math.log10(gib))


def check_memory(
    manifest: Manifest, *, num_shards: int, param_nbytes: int, gpu_gib: float, where: str = "--gpu-memory"
) -> None:
    """Raise where a rank's weights, gradients and moments alone are larger than its GPU's memory.

    `num_shards` ranks share what a stage holds; `param_nbytes` is what one parameter takes in training.
    `where` says who knows the GPU's memory.

    Raises:
        InputError: naming the rank that needs the most.
    """
    placement = manifest.placement
    params = [
        sum(manifest.stages[stage].num_params for stage in placement.stages_on(rank))
        for rank in range(placement.num_ranks)
    ]
    rank = max(range(len(params)), key=params.__getitem__)
    if not gpu_gib > 0:
        raise UsageError(where, f"expected GiB above 0, found {gpu_gib:g}", code="options.invalid-value")
    needed = params[rank] * param_nbytes / num_shards / 2**30
    if needed > gpu_gib:
        raise LaunchError(
            where,
            f"pipeline rank {rank} needs {needed:.{_digits(needed)}f} GiB for weights, gradients and moments alone, "
            f"its GPU has {gpu_gib:g} GiB",
            "more pipeline ranks (reshard pack MANIFEST --layout pp=N) or --dp-shard N make it smaller",
            code="launch.gpu-memory",
        )
