"""What a plan says: stages and ranks, their bytes, work, memory and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manifests.memory import Memory
from manifests.schema import TieGroup
from reshard.forecast import Forecast, imbalance
from reshard.formats.config import CONFIG_ONLY
from reshard.plan import StagePlan
from reshard.planning import Planned
from reshard.report.layout import placement_json, placement_line
from reshard.report.text import group_stages, modules_shown, shorten_rows, table, tie_lines
from reshard.units import show_bytes, show_count, show_numbers

__all__ = ["bottleneck", "dtypes_assumed", "memory_line", "plan_json", "plan_text", "schedule_line"]

_HEAD = ("stage", "rank", "virtual", "modules", "params", "bytes", "fwd FLOP/token", "memory", "share")


def plan_text(planned: Planned, again_nbytes: int = 0) -> str:
    """Say it all; `again_nbytes` are read once more than the plan has it."""
    plan, shape = planned.plan, planned.shape
    rows = [_row(planned, run) for run in group_stages(plan.stages, _likeness(planned))]
    lines = [
        f"{shape.architecture}, {shape.num_layers} layers, {shape.num_params:,} parameters",
        placement_line(plan.layout),
        table(_HEAD, shorten_rows(rows, _HEAD.index("modules")), left=frozenset({"modules"})),
    ]
    if len(rows) < len(plan.stages):
        lines.append("a row of several stages gives the figures of each, and the most memory of any")
    forecast = planned.forecast
    by_stage, by_rank = imbalance(forecast.stage_times), imbalance(forecast.rank_times)
    lines.append(f"imbalance, slowest over mean: stages {by_stage:.3f}, ranks {by_rank:.3f}")
    lines += [bottleneck(forecast), schedule_line(forecast), memory_line(forecast)]
    lines += tie_lines(plan.ties)
    if assumed := dtypes_assumed(planned):
        lines.append(f"from the config alone: bytes as if stored in {assumed}")
    twice = f" ({show_bytes(again_nbytes)} of it twice: first for the digests)" if again_nbytes else ""
    lines.append(f"to read {show_bytes(plan.read_nbytes)}{twice}, to write {show_bytes(plan.write_nbytes)}")
    return "\n".join(lines)


def plan_json(planned: Planned, again_nbytes: int = 0) -> dict[str, Any]:
    plan, forecast = planned.plan, planned.forecast
    placement, assumed = forecast.placement, forecast.assumed
    stage_shares, rank_shares = _shares(forecast.stage_times), _shares(forecast.rank_times)
    makespan = forecast.timeline.makespan_s
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
                "memory_nbytes": _memory_json(forecast.memory.stages[stage.index]),
                "share_of_slowest": stage_shares[stage.index],
            }
            for stage in plan.stages
        ],
        "ranks": [
            {
                "rank": rank,
                "stages": list(placement.stages_on(rank)),
                "memory_nbytes": _memory_json(forecast.memory.ranks[rank]),
                "share_of_slowest": rank_shares[rank],
                "bubble": 1 - forecast.timeline.busy_s[rank] / makespan if makespan else 0.0,
            }
            for rank in range(placement.num_ranks)
        ],
        "imbalance": {"stages": imbalance(forecast.stage_times), "ranks": imbalance(forecast.rank_times)},
        "bubble": forecast.timeline.bubble,
        "step_s": makespan if assumed.measured else None,
        "assumed": {
            "schedule": forecast.schedule,
            "num_microbatches": forecast.num_microbatches,
            "microbatch": assumed.microbatch,
            "seq_len": assumed.seq_len,
            "dtype_policy": assumed.policy,
            "memory_limit_nbytes": assumed.memory_limit,
            "times": "measured" if assumed.measured else "flops",
            "stored_dtypes": dtypes_assumed(planned).split(", ") if dtypes_assumed(planned) else None,
        },
        "ties": [_tie_json(tie) for tie in plan.ties],
        "read_nbytes": plan.read_nbytes + again_nbytes,
        "write_nbytes": plan.write_nbytes,
    }


def bottleneck(forecast: Forecast) -> str:
    """Say which ranks set the pace."""
    placement, slowest = forecast.placement, forecast.slowest_ranks
    if placement.num_ranks == 1:
        return "no bottleneck: there is one rank"
    if len(slowest) == placement.num_ranks:
        return "no bottleneck: every rank takes the same time"
    if not forecast.bottleneck:
        return f"no bottleneck: ranks {show_numbers(slowest)} take the same time, the others less"
    how = f"{imbalance(forecast.rank_times):.2f} times the mean rank's time"
    if len(slowest) > 1:
        return f"ranks {show_numbers(slowest)} are the bottleneck: each takes {how}"
    stages = placement.stages_on(slowest[0])
    named = f"stage{'s' if len(stages) > 1 else ''} {show_numbers(stages)}"
    return f"rank {slowest[0]} ({named}) is the bottleneck: it takes {how}"


def schedule_line(forecast: Forecast) -> str:
    assumed, timeline = forecast.assumed, forecast.timeline
    step = f", a step takes {timeline.makespan_s:.4g} s" if assumed.measured else ""
    return (
        f"{forecast.schedule}, {forecast.num_microbatches} microbatches of {assumed.microbatch} x {assumed.seq_len} "
        f"tokens: ranks wait {timeline.bubble:.1%} of the time (bubble){step}"
    )


def memory_line(forecast: Forecast) -> str:
    totals = [memory.total for memory in forecast.memory.ranks]
    most, limit = totals.index(max(totals)), forecast.assumed.memory_limit
    line = f"rank {most} needs the most memory, {show_bytes(totals[most])}, estimated for {forecast.assumed.policy}"
    if not limit:
        return line
    over = forecast.ranks_over_limit
    if not over:
        return f"{line}: {totals[most] / limit:.0%} of the limit of {show_bytes(limit)}"
    over_shown = f"rank {over[0]} is" if len(over) == 1 else f"ranks {show_numbers(over)} are"
    return f"{line}: {over_shown} OVER the limit of {show_bytes(limit)}"


def dtypes_assumed(planned: Planned) -> str:
    """Name the dtypes that bytes are counted in when there are no weights, or nothing."""
    if planned.checkpoint.source.kind != CONFIG_ONLY:
        return ""
    return ", ".join(sorted({tensor.dtype for tensor in planned.checkpoint.tensors.values()}))


def _row(planned: Planned, run: Sequence[StagePlan]) -> tuple[str, ...]:
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
        show_bytes(max(forecast.memory.stages[stage.index].total for stage in run)),
        f"{_shares(forecast.stage_times)[first.index]:.0%}",
    )


def _likeness(planned: Planned) -> list[object]:
    times = planned.forecast.stage_times
    return [
        (stage.virtual, len(stage.modules), stage.num_params, stage.nbytes, times[stage.index])
        for stage in planned.plan.stages
    ]


def _shares(times: Sequence[float]) -> list[float]:
    slowest = max(times)
    return [time / slowest if slowest else 1.0 for time in times]


def _memory_json(memory: Memory) -> dict[str, int]:
    return {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "wires": memory.wires,
        "total": memory.total,
    }


def _tie_json(tie: TieGroup) -> dict[str, Any]:
    owner, *replicas = ({"fqn": member.fqn, "stage": member.stage} for member in tie.members)
    return {"owner": owner, "replicas": replicas}
