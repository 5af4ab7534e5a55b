"""The output of `reshard plan` (bytes, FLOPs, memory and pipeline bubble) and of `reshard layout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from manifests.command.console import table
from manifests.command.sizes import show_bytes
from manifests.models.memory import Memory
from manifests.schedules.simulation import Timeline
from reshard.estimate.assumptions import Assumptions
from reshard.estimate.training_estimate import Forecast, imbalance
from reshard.formats.open import CONFIG_ONLY
from reshard.formatting import counted, group_stages, shorten_rows, show_count, show_numbers, tie_lines
from reshard.layouts import StageLayout
from reshard.layouts.model import modules_shown
from reshard.packing.memory_fit import largest_tried, smallest_fit
from reshard.packing.plan import PlanResult
from reshard.plans.pack_plan import StagePlan, Traffic, traffic_of

_USUAL = (1, "none", None)  # values that a plan does not show
_HEAD = ("stage", "rank", "vpp", "modules", "params", "bytes", "fwd FLOP/token", "memory", "share")


def plan_text(planned: PlanResult, traffic: Traffic | None = None) -> str:
    """Return the plan as text; `traffic` is what a pack reads and writes, if that is not the whole plan."""
    plan, shape = planned.plan, planned.shape
    traffic = traffic or traffic_of(plan.shards_on())
    rows = [_row(planned, run) for run in group_stages(plan.stages, _group_keys(planned))]
    lines = [
        f"{shape.architecture}, {shape.num_layers} layers, {shape.num_params:,} parameters",
        placement_line(plan.layout),
        *not_fitting(planned),
        table(_HEAD, shorten_rows(rows, _HEAD.index("modules")), left_columns=frozenset({"modules"})),
    ]
    if len(rows) < len(plan.stages):
        lines.append("rows of several stages show the figures of one stage, and the highest memory")
    forecast = planned.forecast
    by_stage, by_rank = imbalance(forecast.stage_times), imbalance(forecast.rank_times)
    lines.append(f"imbalance (slowest / mean): stages {by_stage:.3f}, ranks {by_rank:.3f}")
    lines.append(bottleneck(forecast))
    lines += [_too_long(forecast)] if forecast.step is None else [schedule_line(forecast), memory_line(forecast)]
    lines += tie_lines(plan.ties)
    if assumed := dtypes_assumed(planned):
        lines.append(f"no weights, only a config: bytes as if stored in {assumed}")
    again = traffic.again_nbytes
    twice = f" ({show_bytes(again)} of it twice, once for digests)" if again else ""
    lines.append(f"to read {show_bytes(traffic.once_nbytes)}{twice}, to write {show_bytes(traffic.write_nbytes)}")
    return "\n".join(lines)


def plan_json(planned: PlanResult, traffic: Traffic | None = None) -> dict[str, Any]:
    """Return the object that `--json` prints; values of a step too long to simulate are null."""
    plan, forecast = planned.plan, planned.forecast
    traffic, step = traffic or traffic_of(plan.shards_on()), forecast.step
    placement, assumed = forecast.placement, forecast.assumed
    stage_shares, rank_shares = _shares(forecast.stage_times), _shares(forecast.rank_times)
    return {
        **placement_json(plan.layout),
        "stages": [
            {
                "index": stage.index,
                "rank": stage.rank,
                "virtual": stage.virtual,
                "modules": list(stage.modules),
                "params": stage.num_params,
                "nbytes": stage.nbytes,
                "forward_flops_per_token": forecast.flops[stage.index],
                "memory_nbytes": _memory_json(step.memory.stages[stage.index]) if step else None,
                "share_of_slowest": stage_shares[stage.index],
            }
            for stage in plan.stages
        ],
        "ranks": [
            {
                "rank": rank,
                "stages": list(placement.stages_on(rank)),
                "memory_nbytes": _memory_json(step.memory.ranks[rank]) if step else None,
                "share_of_slowest": rank_shares[rank],
                "bubble": _idle(step.timeline, rank) if step else None,
            }
            for rank in range(placement.num_ranks)
        ],
        "smallest_fit": _fit_json(planned),
        "imbalance": {"stages": imbalance(forecast.stage_times), "ranks": imbalance(forecast.rank_times)},
        "bubble": step.timeline.bubble if step else None,
        "step_s": step.timeline.makespan_s + forecast.overhead_s if step and assumed.measured else None,
        "assumed": {
            "schedule": forecast.schedule,
            "microbatch_group": assumed.microbatch_group,
            "num_microbatches": forecast.num_microbatches,
            "microbatch": assumed.microbatch,
            "seq_len": assumed.seq_len,
            "dtype": assumed.dtype,
            "master_dtype": assumed.master_dtype or assumed.dtype,
            "dp_replicate": assumed.replicate,
            "dp_shard": assumed.shard,
            "tp": assumed.tensor,
            "cp": assumed.context,
            "cp_method": assumed.context_method,
            "ep": assumed.expert,
            "ac": assumed.recompute,
            "loss_chunk": assumed.loss_chunk,
            "host_memory": assumed.host_memory,
            "memory_limit_nbytes": assumed.memory_limit,
            "times": "measured" if assumed.measured else "flops",
            "work": "estimated" if planned.shape.is_estimated else "exact",
            "stored_dtypes": dtypes_assumed(planned).split(", ") if dtypes_assumed(planned) else None,
        },
        "ties": [asdict(tie) for tie in plan.ties],
        "untied": [list(group) for group in planned.checkpoint.misread],
        "read_nbytes": traffic.read_nbytes,
        "write_nbytes": traffic.write_nbytes,
    }


def not_fitting(planned: PlanResult) -> tuple[str, ...]:
    """Return a line that some ranks exceed the memory limit, and what fits; nothing where they do not."""
    forecast, limit = planned.forecast, planned.assumed.memory_limit or 0
    if forecast.step is None or not (over := forecast.ranks_over_limit):
        return ()
    most = show_bytes(max(memory.total for memory in forecast.memory.ranks))
    named = f"rank {over[0]} needs" if len(over) == 1 else f"ranks {show_numbers(over)} need up to"
    fit = smallest_fit(planned)
    if fit is not None:
        what = f"{fit} fits, on {fit.num_ranks:,} ranks"
    else:
        tried = ", ".join(largest_tried(planned))
        what = f"nothing fits of what was tried, up to {tried}" if tried else "nothing else can be tried"
    return (f"DOES NOT FIT: {named} {most} of {show_bytes(limit)}; {what}",)


def bottleneck(forecast: Forecast) -> str:
    placement, slowest = forecast.placement, forecast.slowest_ranks
    if placement.num_ranks == 1:
        return "no bottleneck: only one rank"
    if len(slowest) == placement.num_ranks:
        return "no bottleneck: all ranks take the same time"
    if not forecast.bottleneck:
        return f"no bottleneck: ranks {show_numbers(slowest)} take the same time, the others less"
    how = f"{imbalance(forecast.rank_times):.2f}x the mean time of a rank"
    if len(slowest) > 1:
        return f"ranks {show_numbers(slowest)} are the bottleneck: {how} each"
    stages = placement.stages_on(slowest[0])
    named = f"stage{'s' if len(stages) > 1 else ''} {show_numbers(stages)}"
    return f"rank {slowest[0]} ({named}) is the bottleneck: {how}"


def schedule_line(forecast: Forecast) -> str:
    assumed, timeline = forecast.assumed, forecast.timeline
    step = f", {timeline.makespan_s + forecast.overhead_s:.4g} s per step" if assumed.measured else ""
    return (
        f"{forecast.schedule}, {forecast.num_microbatches} microbatches of {assumed.microbatch} x {assumed.seq_len} "
        f"tokens: pipeline bubble {timeline.bubble:.1%}{step}"
    )


def _too_long(forecast: Forecast) -> str:
    num_stages, number = forecast.placement.num_stages, forecast.num_microbatches
    return (
        f"{forecast.schedule}, {number} microbatches on {num_stages} stages: step too long to simulate, no estimate of "
        "memory and bubble; lower --microbatches"
    )


def memory_line(forecast: Forecast) -> str:
    totals = [memory.total for memory in forecast.memory.ranks]
    most, limit = totals.index(max(totals)), forecast.assumed.memory_limit
    line = f"peak memory: rank {most}, {show_bytes(totals[most])}, estimated for {_shown(forecast.assumed)}"
    if not limit:
        return line
    over = forecast.ranks_over_limit
    if not over:
        return f"{line}; {totals[most] / limit:.0%} of the limit, {show_bytes(limit)}"
    over_shown = f"rank {over[0]} is" if len(over) == 1 else f"ranks {show_numbers(over)} are"
    return f"{line}; {over_shown} OVER the limit, {show_bytes(limit)}"


def _shown(assumed: Assumptions) -> str:
    """Return the dtypes and what else the memory depends on, as its flags are called."""
    values = {
        "dp-replicate": assumed.replicate,
        "dp-shard": assumed.shard,
        "tp": assumed.tensor,
        "cp": assumed.context,
        "cp-method": assumed.context_method if assumed.context > 1 else None,
        "ep": assumed.expert,
        "ac": assumed.recompute,
        "loss-chunk": assumed.loss_chunk,
        "allocator": assumed.host_memory,
    }
    return ", ".join([assumed.dtypes, *(f"{name}={value}" for name, value in values.items() if value not in _USUAL)])


def dtypes_assumed(planned: PlanResult) -> str:
    """Return the dtypes assumed for a config without weights, or nothing."""
    if planned.checkpoint.source.kind != CONFIG_ONLY:
        return ""
    return ", ".join(sorted({tensor.dtype for tensor in planned.checkpoint.tensors.values()}))


def _row(planned: PlanResult, run: Sequence[StagePlan]) -> tuple[str, ...]:
    first, forecast = run[0], planned.forecast
    modules = modules_shown([module for stage in run for module in stage.modules])
    return (
        show_numbers(stage.index for stage in run),
        show_numbers(stage.rank for stage in run),
        str(first.virtual),
        modules if len(run) == 1 else f"{modules}: {len(first.modules)} each",
        f"{first.num_params:,}",
        show_bytes(first.nbytes),
        show_count(forecast.flops[first.index]),
        show_bytes(max(forecast.memory.stages[stage.index].total for stage in run)) if forecast.step else "-",
        f"{_shares(forecast.stage_times)[first.index]:.0%}",
    )


def _group_keys(planned: PlanResult) -> list[object]:
    times = planned.forecast.stage_times
    return [
        (stage.virtual, len(stage.modules), stage.num_params, stage.nbytes, times[stage.index])
        for stage in planned.plan.stages
    ]


def _idle(timeline: Timeline, rank: int) -> float:
    return 1 - timeline.busy_s[rank] / timeline.makespan_s if timeline.makespan_s else 0.0


def _shares(times: Sequence[float]) -> list[float]:
    slowest = max(times)
    return [time / slowest if slowest else 1.0 for time in times]


def _memory_json(memory: Memory) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def _fit_json(planned: PlanResult) -> dict[str, Any] | None:
    forecast = planned.forecast
    fit = smallest_fit(planned) if forecast.step is not None and forecast.ranks_over_limit else None
    return None if fit is None else {"changes": list(fit.changes), "num_ranks": fit.num_ranks}


def layout_json(layout: StageLayout) -> dict[str, Any]:
    placement = layout.placement
    return {
        **placement_json(layout),
        "stages": [
            {
                "index": index,
                "rank": placement.rank_of(index),
                "virtual": placement.virtual_of(index),
                "modules": list(modules),
            }
            for index, modules in enumerate(layout.stages)
        ],
    }


def layout_text(layout: StageLayout) -> str:
    placement, stages = layout.placement, layout.stages
    keys = [
        (placement.virtual_of(index), len(modules), all(name.rpartition(".")[2].isdecimal() for name in modules))
        for index, modules in enumerate(stages)
    ]
    rows = []
    for run in group_stages(range(len(stages)), keys):
        modules = modules_shown([module for index in run for module in stages[index]])
        rows.append(
            (
                show_numbers(run),
                show_numbers(map(placement.rank_of, run)),
                str(placement.virtual_of(run[0])),
                modules if len(run) == 1 else f"{modules}: {len(stages[run[0]])} each",
            )
        )
    head = ("stage", "rank", "vpp", "modules")
    return "\n".join([placement_line(layout), table(head, shorten_rows(rows, 3), left_columns=frozenset({"modules"}))])


def placement_json(layout: StageLayout) -> dict[str, Any]:
    placement = layout.placement
    return {
        "version": 1,
        "num_stages": placement.num_stages,
        "num_ranks": placement.num_ranks,
        "num_virtual": placement.num_virtual,
        "style": placement.style,
    }


def placement_line(layout: StageLayout) -> str:
    placement = layout.placement
    stages, ranks = counted(placement.num_stages, "stage"), counted(placement.num_ranks, "pipeline rank")
    return f"{stages} on {ranks}, style {placement.style}"
