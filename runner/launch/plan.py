"""What `launch --dry-run` prints before the command: the plan of the job, as `reshard plan` shows it. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from manifests.command.sizes import show_bytes
from manifests.models.memory import MemoryEstimate
from manifests.models.shape import BACKWARD_SHARE
from manifests.schedules import StageCosts, Table, simulate
from runner.bundle.packed import Packed
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims
from runner.metrics.summary import opening

_HEAD = ("rank", "stages", "modules", "params", "memory")


def describe_plan(
    launched: Packed, options: TrainOptions, degrees: ParallelDims, name: str, table: Table, memory: MemoryEstimate,
    device: str,
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of a job's plan, of which a run that resumes may recall others from its checkpoint."""
    yield from opening(launched.shape, options, degrees, name, device, 1)
    placement, stages = launched.manifest.placement, launched.stage_modules
    rows = [_HEAD]
    for rank in range(placement.num_ranks):
        on_rank = placement.stages_on(rank)
        modules = ", ".join(_shown(stages[stage]) for stage in on_rank)
        params = sum(launched.manifest.stages[stage].num_params for stage in on_rank)
        total = show_bytes(memory.ranks[rank].total)
        rows.append((str(rank), ", ".join(map(str, on_rank)), modules, f"{params:,}", total))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    work, seq_len = launched.shape.work, options.batch.seq_len
    flops = [sum(work[module].forward_flops(seq_len) for module in stage) for stage in stages]
    timeline = simulate(table, StageCosts.of(flops, [BACKWARD_SHARE * count for count in flops]))
    yield f"pipeline bubble {timeline.bubble:.1%}, with times as FLOPs"


def _shown(modules: tuple[str, ...]) -> str:
    names = [module.removeprefix("model.") for module in modules]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "(empty)"
