"""What a run has left in its log folder, read back. No torch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from manifests.errors import InputError
from manifests.placement import Placement

__all__ = ["Action", "RunLog", "StepTrace", "Traces", "read_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """An action of a trace, in seconds from the beginning of its step."""

    kind: str
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """One step: what each rank ran of its schedule, from the first action of any rank to the last's end."""

    step: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def seconds(self) -> float:
        return max(action.end_s for rank in self.ranks for action in rank)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they compute nothing, from 0 to 1."""
        busy_s = sum(action.end_s - action.begin_s for rank in self.ranks for action in rank)
        return 1 - busy_s / (len(self.ranks) * self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """The traced steps of a run, and what its plan is known by."""

    schedule: str
    placement: Placement
    num_microbatches: int
    steps: tuple[StepTrace, ...]

    def seconds_of(self, kind: str) -> tuple[float, ...]:
        """Give the median time of one microbatch on each stage, over all steps; 0 where none ran."""
        found: dict[int, list[float]] = defaultdict(list)
        for step in self.steps:
            for action in (action for rank in step.ranks for action in rank if action.kind == kind):
                found[action.stage].append(action.end_s - action.begin_s)
        return tuple(median(found[stage]) if stage in found else 0.0 for stage in range(self.placement.num_stages))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """Lines of metrics.jsonl by what they tell of, and the traces if there are any."""

    steps: tuple[Mapping[str, Any], ...]  # the last line of each step, in order
    evaluations: tuple[Mapping[str, Any], ...]
    checkpoints: tuple[Mapping[str, Any], ...]
    traces: Traces | None


def read_run(log_dir: Path) -> RunLog:
    """Read what a run has left.

    Raises:
        InputError: no metrics, a line that is no JSON object, or traces of ranks that do not fit together.
    """
    path = log_dir / "metrics.jsonl"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        hint = "give the --log-dir of a run"
        raise InputError(str(path), f"cannot be read: {error.strerror}", hint) from error
    found = [_object(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    steps = {line["step"]: line for line in found if "loss" in line}  # one taken again counts as it was taken last
    if not steps:
        raise InputError(str(path), "tells of no step")
    return RunLog(
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(line for line in found if "eval_loss" in line),
        checkpoints=tuple(line for line in found if "checkpoint" in line and "save_error" not in line),
        traces=_read_traces(log_dir / "trace"),
    )


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(where, f"is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(where, "expected an object")
    return found


def _read_traces(folder: Path) -> Traces | None:
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        return None
    documents = [_object(path.read_text(), str(path)) for path in paths]
    runs = [document.get("run") for document in documents]
    run = runs[0]
    if not isinstance(run, dict) or any(other != run for other in runs):
        raise InputError(str(folder), "holds traces of different runs", "remove the folder, and trace again")
    placement = Placement(num_stages=run["num_stages"], num_ranks=run["num_ranks"], style=run["style"])
    # With data or tensor parallelism several ranks hold the same stages: one pipeline is looked at.
    each = max(1, len(documents) // placement.num_ranks)
    if len(documents) % placement.num_ranks:
        raise InputError(
            str(folder), f"expected a trace of each of {placement.num_ranks} pipeline ranks, found {len(documents)}"
        )
    pipeline = [document["traceEvents"] for document in documents[::each]]
    steps = sorted({event["args"]["step"] for event in pipeline[0] if event["ph"] == "X"})
    return Traces(
        schedule=run["schedule"],
        placement=placement,
        num_microbatches=run["num_microbatches"],
        steps=tuple(_step(step, pipeline) for step in steps),
    )


def _step(step: int, pipeline: list[list[dict[str, Any]]]) -> StepTrace:
    ranks = [
        [event for event in events if event["ph"] == "X" and event["tid"] >= 0 and event["args"]["step"] == step]
        for events in pipeline
    ]
    zero = min(event["ts"] for events in ranks for event in events)
    return StepTrace(
        step=step,
        ranks=tuple(
            tuple(
                Action(
                    kind=event["args"]["kind"],
                    stage=event["tid"],
                    microbatch=event["args"]["microbatch"],
                    begin_s=(event["ts"] - zero) / 1e6,
                    end_s=(event["ts"] - zero + event["dur"]) / 1e6,
                )
                for event in sorted(events, key=lambda event: event["ts"])
            )
            for events in ranks
        ),
    )
