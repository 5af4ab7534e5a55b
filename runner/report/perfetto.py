"""The traced steps of a run as one trace for Perfetto: a process per rank, a thread per stage, arrows for transfers.

Source: the Trace Event Format: complete events (X), and flows (s, f) between the slices that enclose their times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from manifests.command.palette import WORK_COLORS
from manifests.schedules import Action
from manifests.schedules.order import Result, input_of, result_of
from runner.report.read import StepTrace, TracedAction, Traces

_STEP_TID = 0  # the thread of stage n is n + 1
_Placed = tuple[int, TracedAction]  # rank and action


def merged_trace(traces: Traces) -> bytes:
    """Return the trace of all pipeline ranks, as JSON. Times are in microseconds from the first action."""
    flows = count(1)
    events = list(_names(traces))
    for step in traces.steps:
        events += _slices(step, step.zero_s - traces.steps[0].zero_s)
        events += _arrows(step, step.zero_s - traces.steps[0].zero_s, traces.placement.num_stages, flows)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _names(traces: Traces) -> Iterator[dict[str, Any]]:
    for rank in range(traces.placement.num_ranks):
        yield {"name": "process_name", "ph": "M", "pid": rank, "tid": _STEP_TID, "args": {"name": f"rank {rank}"}}
        names = {_STEP_TID: "step", **{stage + 1: f"stage {stage}" for stage in traces.placement.stages_on(rank)}}
        for tid, name in names.items():
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}


def _slices(step: StepTrace, zero_s: float) -> Iterator[dict[str, Any]]:
    for rank, actions in enumerate(step.ranks):
        begin_s, end_s = min(each.begin_s for each in actions), max(each.end_s for each in actions)
        whole = {"name": f"step {step.step}", "ph": "X", "pid": rank, "tid": _STEP_TID}
        yield {**whole, "ts": (zero_s + begin_s) * 1e6, "dur": (end_s - begin_s) * 1e6, "args": {"step": step.step}}
        for action in actions:
            yield {
                "name": WORK_COLORS[action.kind][0],
                "ph": "X",
                "pid": rank,
                "tid": action.stage + 1,
                "ts": (zero_s + action.begin_s) * 1e6,
                "dur": (action.end_s - action.begin_s) * 1e6,
                "args": {"step": step.step, "microbatch": action.microbatch, "stage": action.stage},
            }


def _arrows(step: StepTrace, zero_s: float, num_stages: int, flows: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each action to the one on another rank that receives its result."""
    placed = [(rank, each) for rank, actions in enumerate(step.ranks) for each in actions if each.kind != "L"]
    done: dict[Result, _Placed] = {}
    for rank, action in placed:
        done.setdefault(result_of(_action(action)), (rank, action))
    for rank, action in placed:
        wanted = input_of(_action(action), num_stages)
        sender = done.get(wanted) if wanted else None
        if sender is None or sender[0] == rank:
            continue
        name = "activations" if action.kind == "F" else "gradients"
        both = {"name": name, "cat": "transfer", "id": next(flows)}
        sent, received = _middle(sender[1], 0.999), _middle(action, 0.001)
        yield {**both, "ph": "s", "pid": sender[0], "tid": sender[1].stage + 1, "ts": (zero_s + sent) * 1e6}
        yield {**both, "ph": "f", "bp": "e", "pid": rank, "tid": action.stage + 1, "ts": (zero_s + received) * 1e6}


def _action(traced: TracedAction) -> Action:
    return Action(stage=traced.stage, kind=traced.kind, microbatch=traced.microbatch)  # type: ignore[arg-type]


def _middle(action: TracedAction, share: float) -> float:
    """Return a time within an action: a flow's end belongs to the slice around it."""
    return action.begin_s + share * (action.end_s - action.begin_s)
