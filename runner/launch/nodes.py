"""Which ranks sit on which node, and which stages they hold. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manifests.errors import InputError, UsageError
from manifests.schema import Manifest

__all__ = ["NodePlan", "check_memory", "parse_nnodes", "plan_nodes", "printed"]


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
    if text.isdecimal() and int(text) > 0:
        return int(text)
    hint = "every rank has its stages: a job cannot grow or shrink while it runs" if ":" in text else ""
    raise UsageError("--nnodes", f"expected one number from 1 up, found {text!r}", hint)


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


def check_memory(manifest: Manifest, *, num_shards: int, param_nbytes: int, gpu_gib: float) -> None:
    """Raise where a rank's weights, gradients and moments alone are larger than its GPU's memory.

    `num_shards` ranks share what a stage holds; `param_nbytes` is what one parameter takes in training.

    Raises:
        InputError: naming the rank that needs the most.
    """
    placement = manifest.placement
    params = [
        sum(manifest.stages[stage].num_params for stage in placement.stages_on(rank))
        for rank in range(placement.num_ranks)
    ]
    rank = max(range(len(params)), key=params.__getitem__)
    needed = params[rank] * param_nbytes / num_shards / 2**30
    if needed > gpu_gib:
        raise InputError(
            "--gpu-memory",
            f"pipeline rank {rank} needs {needed:.1f} GiB for weights, gradients and moments alone, "
            f"its GPU has {gpu_gib:g} GiB",
            "more pipeline ranks (reshard pack MANIFEST --layout pp=N) or --dp-shard N make it smaller",
        )
