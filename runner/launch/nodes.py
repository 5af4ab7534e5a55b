"""The placement of ranks and stages on nodes, the memory that they need, and the plan of a job. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from manifests.command.console import table
from manifests.command.sizes import show_bytes
from manifests.errors import LaunchError, UsageError
from manifests.models.memory import MemoryEstimate
from manifests.models.shape import BACKWARD_SHARE
from manifests.schedules.actions import Table
from manifests.schedules.simulation import StageCosts, simulate
from manifests.schema import Manifest
from runner.bundle.packed import Packed
from runner.config.declared import nearest_multiples
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims
from runner.metrics.summary import opening
from runner.tensors.heap import available_nbytes


def parse_nnodes(text: str) -> int:
    """Read a number of nodes."""
    if re.fullmatch(r"0*[1-9][0-9]{0,4}", text, re.ASCII):
        return int(text)
    hint = "elastic jobs are not supported: every rank has fixed stages" if ":" in text else ""
    raise UsageError("--nnodes", f"expected one number from 1 to 99999, found {text!r}", hint, code="launch.nodes")


def check_ranks(num_pipeline_ranks: int, nnodes: int, nproc_per_node: int) -> None:
    """Check that the ranks of so many nodes are a multiple of the pipeline ranks of a manifest."""
    world_size = nnodes * nproc_per_node
    if world_size % num_pipeline_ranks == 0:
        return
    ranks = nearest_multiples(nproc_per_node, num_pipeline_ranks // math.gcd(num_pipeline_ranks, nnodes))
    nodes = nearest_multiples(nnodes, num_pipeline_ranks // math.gcd(num_pipeline_ranks, nproc_per_node))
    raise LaunchError(
        "",
        f"expected a multiple of the manifest's {num_pipeline_ranks} pipeline ranks, found {nnodes} nodes x "
        f"{nproc_per_node} ranks = {world_size}",
        f"use --nproc-per-node {ranks} or --nnodes {nodes}, or reshard pack MANIFEST --layout pp={world_size} "
        "--out DIR",
        code="launch.world-size",
    )


def check_groups(degrees: ParallelDims, nnodes: int, nproc_per_node: int) -> tuple[str, ...]:
    """Return a note for each kind of process group that communicates often and spans nodes."""
    per_stage, notes = degrees.per_stage, []
    if nnodes == 1:
        return ()
    for kind, flag, degree in (("tensor", "--tp", degrees.tensor), ("expert", "--ep", degrees.expert)):
        if degree > nproc_per_node:
            notes.append(
                f"each {kind}-parallel group of {degree} ranks spans several nodes, and communicates in every layer; "
                f"{flag} {math.gcd(degree, nproc_per_node)} keeps it on one node"
            )
        elif nproc_per_node % degree:
            article = "an" if kind == "expert" else "a"
            raise UsageError(
                "--nproc-per-node",
                f"{nproc_per_node} ranks per node split {article} {kind}-parallel group of {degree}, which "
                "communicates in every layer, over two nodes",
                f"use a multiple of {flag} {degree}: {nearest_multiples(nproc_per_node, degree)}",
                code="launch.split-tp-group",
            )
    if notes:
        return tuple(notes)
    if per_stage > nproc_per_node or nproc_per_node % per_stage == 0:
        return ()
    split = next(
        first for first in range(0, nnodes * nproc_per_node, per_stage) if _is_cut(first, degrees, nproc_per_node)
    )
    fits = [count for count in range(per_stage, nnodes * nproc_per_node + 1, per_stage)
            if nnodes * nproc_per_node % count == 0]  # fmt: skip
    best = min(fits, key=lambda count: (abs(count - nproc_per_node), count))
    return (
        f"ranks {split}-{split + per_stage - 1} share their stages and span two nodes, although {per_stage} ranks fit "
        f"on one: --nnodes {nnodes * nproc_per_node // best} --nproc-per-node {best} keeps them together",
    )


def _is_cut(first: int, degrees: ParallelDims, nproc_per_node: int) -> bool:
    return first // nproc_per_node != (first + degrees.per_stage - 1) // nproc_per_node


def describe_nodes(manifest: Manifest, nnodes: int, nproc_per_node: int) -> str:
    """Return a line for each node of a job. Ranks of one stage are adjacent, and so are adjacent stages."""
    placement, world_size = manifest.placement, nnodes * nproc_per_node
    num_per_stage = max(1, world_size // placement.num_ranks)  # ranks that share their stages
    lines = []
    for node in range(nnodes):
        first, last = node * nproc_per_node, (node + 1) * nproc_per_node - 1
        pipeline_ranks = range(first // num_per_stage, min(last // num_per_stage + 1, placement.num_ranks))
        stages = sorted(stage for rank in pipeline_ranks for stage in placement.stages_on(rank))
        lines.append(f"node {node}: ranks {first}-{last}, stages {', '.join(map(str, stages))}")
    return "\n".join(lines)


def check_host_memory(planned: MemoryEstimate, num_per_stage: int) -> None:
    """Check that ranks on this machine's CPUs need at most twice the memory that is available now.

    What they do not need yet may become free, and the estimate may be above the peak; a rank says what is available.
    """
    available, totals = available_nbytes(1), [memory.total for memory in planned.ranks]
    if available is not None and sum(totals) * num_per_stage > 2 * available:
        raise LaunchError(
            "--device cpu",
            f"ranks here need up to {show_bytes(max(totals))} each, {show_bytes(sum(totals) * num_per_stage)} in all; "
            f"{show_bytes(available)} are available",
            "lower --seq-len or --microbatch, or use --ac full or --dtype bf16",
            code="launch.host-memory",
        )


def check_memory(planned: MemoryEstimate, gpu_nbytes: int, where: str) -> str:
    """Check that each rank's weights, gradients and optimizer state fit in its GPU's memory.

    Returns a note if a rank that trains is estimated to exceed it, with activations; else an empty text. `where` names
    the source of the GPU's memory size.
    """
    states = [memory.state for memory in planned.ranks]
    totals = [memory.total for memory in planned.ranks]
    rank, fullest = states.index(max(states)), totals.index(max(totals))
    more = "use more pipeline ranks (reshard pack MANIFEST --layout pp=N), --tp N, --dp-shard N"
    if states[rank] > gpu_nbytes:
        raise LaunchError(
            where,
            f"pipeline rank {rank} needs {show_bytes(states[rank])} for weights, gradients and optimizer state, "
            f"its GPU has {show_bytes(gpu_nbytes)}",
            f"{more} or --dtype bf16",
            code="launch.gpu-memory",
        )
    if totals[fullest] <= gpu_nbytes:
        return ""
    return (
        f"pipeline rank {fullest} is estimated to need {show_bytes(totals[fullest])}, its GPU has "
        f"{show_bytes(gpu_nbytes)} ({where}); {more}, --dtype bf16, --ac full or a lower --microbatch or --seq-len"
    )


_HEAD = ("rank", "stages", "modules", "params", "memory")


def describe_plan(
    launched: Packed, options: TrainOptions, degrees: ParallelDims, name: str, actions: Table, memory: MemoryEstimate,
    device: str,
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of a job's plan, of which a run that resumes may recall others from its checkpoint."""
    yield from opening(launched.shape, options, degrees, name, device, 1)
    placement, stages = launched.manifest.placement, launched.stage_modules
    rows = []
    for rank in range(placement.num_ranks):
        on_rank = placement.stages_on(rank)
        modules = ", ".join(_shown(stages[stage]) for stage in on_rank)
        params = sum(launched.manifest.stages[stage].num_params for stage in on_rank)
        total = show_bytes(memory.ranks[rank].total)
        rows.append((str(rank), ", ".join(map(str, on_rank)), modules, f"{params:,}", total))
    yield from table(_HEAD, rows, left_columns=frozenset(_HEAD)).splitlines()
    work, seq_len = launched.shape.work, options.batch.seq_len
    flops = [sum(work[module].forward_flops(seq_len) for module in stage) for stage in stages]
    timeline = simulate(actions, StageCosts.of(flops, [BACKWARD_SHARE * count for count in flops]))
    yield f"pipeline bubble {timeline.bubble:.1%}, with times as FLOPs"


def _shown(modules: tuple[str, ...]) -> str:
    names = [module.removeprefix("model.") for module in modules]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "(empty)"
