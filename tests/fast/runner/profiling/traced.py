"""Log folders of runs whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

from manifests.placement import Placement
from manifests.schedules.simulation import StageCosts, simulate
from manifests.schedules.tables import schedule_table
from runner.profiling.trace import trace_path


def write_metrics(log_dir: Path, num_steps: int = 4) -> None:
    lines = [{"step": s, "loss": 4.0 - s / 10, "tokens_per_s": 100.0 + s} for s in range(1, num_steps + 1)]
    lines += [{"step": 4, "checkpoint": "c/step-000004", "stall_s": 0.25}, {"step": 4, "eval_loss": 3.5}]
    (log_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_traces(
    log_dir: Path, schedule: str, placement: Placement, num_microbatches: int, *, hop_s: float = 0.0
) -> float:
    """Write what ranks would run that keep to the schedule, and give its bubble."""
    num_stages = placement.num_stages
    costs = StageCosts(
        forward_s=tuple(0.010 + 0.001 * stage for stage in range(num_stages)),
        input_s=tuple(0.012 for _ in range(num_stages)),
        weight_s=tuple(0.009 for _ in range(num_stages)),
        hop_s=hop_s,
    )
    timeline = simulate(schedule_table(schedule, placement, num_microbatches), costs)
    run = {
        "schedule": schedule, "num_stages": num_stages, "num_ranks": placement.num_ranks, "style": placement.style,
        "num_microbatches": num_microbatches,
    }  # fmt: skip
    for rank, spans in enumerate(timeline.ranks):
        events = [
            {
                "name": str(span.action), "ph": "X", "pid": rank, "tid": span.action.stage,
                "ts": 1e9 + span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"step": 3, "kind": span.action.kind, "microbatch": span.action.microbatch},
            }
            for span in spans
        ]  # fmt: skip
        path = trace_path(log_dir, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "run": run}))
    return timeline.bubble
