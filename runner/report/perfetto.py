"""The traced steps of a run as one trace for Perfetto: a process per rank, a thread per stage, arrows for transfers.

What torch.profiler saw of a rank (`--profile`) has processes of its own, on the same clock.

Source: the Trace Event Format: complete events (X), and flows (s, f) between the slices that enclose their times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from manifests.command.palette import WORK_COLORS
from manifests.errors import LogError
from manifests.schedules.order import Result, input_of, result_of
from manifests.schedules.simulation import TimedAction
from runner.report.read import StepTrace, Traces, read_object, read_text

_STEP_TID = 0  # the thread of stage n is n + 1


def merged_trace(traces: Traces) -> bytes:
    """Return the trace of all pipeline ranks, as JSON. Times are in microseconds from the first action."""
    flows = count(1)
    events = list(_names(traces))
    for step in traces.steps:
        events += _slices(step, step.zero_s - traces.steps[0].zero_s)
        events += _arrows(step, step.zero_s - traces.steps[0].zero_s, traces.placement.num_stages, flows)
    pids: dict[tuple[int, object], int] = {}
    for shown, rank in enumerate(traces.ranks):
        for path in sorted((traces.folder.parent / "profile").glob(f"rank-{rank:05d}-step-*.json")):
            events += _kernels(path, shown, traces, pids)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _names(traces: Traces) -> Iterator[dict[str, Any]]:
    for rank, number in enumerate(traces.ranks):
        yield {"name": "process_name", "ph": "M", "pid": rank, "tid": _STEP_TID, "args": {"name": f"rank {number}"}}
        names = {_STEP_TID: "step", **{stage + 1: f"stage {stage}" for stage in traces.placement.stages_on(rank)}}
        for tid, name in names.items():
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}


def _kernels(path: Path, rank: int, traces: Traces, pids: dict[tuple[int, object], int]) -> Iterator[dict[str, Any]]:
    """Yield what torch.profiler wrote: its times are in microseconds, after a time of its own."""
    document = read_object(read_text(path), str(path))
    began, events = document.get("baseTimeNanoseconds", 0), document.get("traceEvents", [])
    if not _is_number(began) or not isinstance(events, list) or not all(map(_is_event, events)):
        raise LogError(str(path), "is not a trace of torch.profiler", "remove it", code="log.bad-field")
    shift = began / 1e3 - traces.steps[0].zero_s * 1e6
    if max((event["ts"] for event in events if event.get("ph") == "X"), default=0.0) + shift < 0:
        return  # of a run before this one: it ended before the first traced step
    for event in events:
        pid = pids.setdefault((rank, event.get("pid")), traces.placement.num_ranks + len(pids))
        changed = {**event, "pid": pid, "ts": event.get("ts", 0.0) + shift}
        if "id" in event:
            changed["id"] = f"{rank}.{event['id']}"
        if event.get("name") == "process_name":
            changed["args"] = {"name": f"rank {traces.ranks[rank]}: {event['args']['name']}"}
        yield changed


def _is_event(event: Any) -> bool:
    """Whether the fields that are changed have their types."""
    if not isinstance(event, dict) or not _is_number(event.get("ts", 0)) or isinstance(event.get("pid"), dict | list):
        return False
    is_named = event.get("name") != "process_name" or (
        isinstance(event.get("args"), dict) and isinstance(event["args"].get("name"), str)
    )
    return is_named and (event.get("ph") != "X" or "ts" in event)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _slices(step: StepTrace, zero_s: float) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(step.timeline.ranks):
        start_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
        whole = {"name": f"step {step.step}", "ph": "X", "pid": rank, "tid": _STEP_TID}
        yield {**whole, "ts": (zero_s + start_s) * 1e6, "dur": (end_s - start_s) * 1e6, "args": {"step": step.step}}
        for action, start_s, end_s in spans:
            yield {
                "name": WORK_COLORS[action.kind][0],
                "ph": "X",
                "pid": rank,
                "tid": action.stage + 1,
                "ts": (zero_s + start_s) * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "args": {"step": step.step, "microbatch": action.microbatch, "stage": action.stage},
            }


def _arrows(step: StepTrace, zero_s: float, num_stages: int, flows: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each action to the one on another rank that receives its result."""
    spans_of = enumerate(step.timeline.ranks)
    placed = [(rank, span) for rank, spans in spans_of for span in spans if span.action.kind != "L"]
    senders: dict[Result, tuple[int, TimedAction]] = {}
    for rank, span in placed:
        senders.setdefault(result_of(span.action), (rank, span))
    for rank, span in placed:
        needed = input_of(span.action, num_stages)
        if needed not in senders or senders[needed][0] == rank:
            continue
        sender, sent = senders[needed]
        name = "activations" if span.action.kind == "F" else "gradients"
        both = {"name": name, "cat": "transfer", "id": next(flows)}
        sent_s, received_s = zero_s + _within(sent, 0.999), zero_s + _within(span, 0.001)
        yield {**both, "ph": "s", "pid": sender, "tid": sent.action.stage + 1, "ts": sent_s * 1e6}
        yield {**both, "ph": "f", "bp": "e", "pid": rank, "tid": span.action.stage + 1, "ts": received_s * 1e6}


def _within(span: TimedAction, share: float) -> float:
    """Return a time within an action: a flow's end belongs to the slice around it."""
    return span.start_s + share * (span.end_s - span.start_s)
