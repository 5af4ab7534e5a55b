"""Read the log folder of a run, and check its lines and traces field by field: a report relies on them. No torch."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from manifests.errors import InputError, LogError, UserError, refused_by_system
from manifests.jsontext import kind_of
from manifests.placement import Placement
from manifests.schedules.actions import Action
from manifests.schedules.simulation import TimedAction, Timeline, simulate
from runner.pipeline.timetable import find_timetable
from runner.profiling.step_times import PARTS, stage_costs
from runner.rundir.records import check_same_run, read_run_record, run_id

Line = Mapping[str, Any]
_MOST = 1 << 62
_MEASURED = ("data_s",)
_SIMULATED = ("compute_s", "communication_s", "bubble_s")  # of the steps that were timed
_KINDS = "FBIWL"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """One step, from the start of its first action, at `zero_s`, to the end of its last. Transfers count as bubble."""

    step: int
    zero_s: float  # by the clock of the ranks
    timeline: Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """The traced steps of a run, and its schedule."""

    folder: Path
    ranks: tuple[int, ...]  # of all of the job, those that are shown
    schedule: str
    placement: Placement
    num_microbatches: int
    microbatch_group: int | None
    steps: tuple[StepTrace, ...]

    @property
    def bubble(self) -> float:
        """The median over the steps."""
        return median(step.timeline.bubble for step in self.steps)

    @property
    def seconds(self) -> float:
        return median(step.timeline.makespan_s for step in self.steps)

    def planned(self) -> Timeline:
        """Simulate the schedule with the time that each stage took for a microbatch.

        Transfers are assumed to be free: their cost is the difference to the measured time.
        """
        try:
            timetable = find_timetable(self.schedule, self.placement, self.num_microbatches, self.microbatch_group)
        except UserError as error:
            raise error.within(str(self.folder)) from error
        costs = stage_costs(*(self.seconds_of(kind) for kind in "FBIWL"))
        return simulate(timetable.planned(self.num_microbatches), costs)

    def seconds_of(self, kind: str) -> tuple[float, ...]:
        """Return the median time of one microbatch on each stage, over all steps; 0 where none ran."""
        times: dict[int, list[float]] = defaultdict(list)
        for step in self.steps:
            for action, start_s, end_s in chain.from_iterable(step.timeline.ranks):
                if action.kind == kind:
                    times[action.stage].append(end_s - start_s)
        return tuple(median(times[stage]) if stage in times else 0.0 for stage in range(self.placement.num_stages))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """The lines of metrics.jsonl by kind, and the traces if there are any.

    A run may have several attempts, each resuming from a checkpoint: of steps that were taken again, the last attempt
    counts, and steps beyond the one where the last attempt ended are dropped.
    """

    steps: tuple[Mapping[str, Any], ...]  # in order, each once
    evaluations: tuple[Mapping[str, Any], ...]
    checkpoints: tuple[Mapping[str, Any], ...]
    loads: tuple[Mapping[str, Any], ...]  # of each rank, in the last attempt
    peaks_nbytes: Mapping[int, int]  # of ranks, at the end of the last attempt if it finished
    begins: tuple[int, ...]  # the first step of each attempt
    traces: Traces | None
    record: Mapping[str, Any] | None  # run.json


def read_run(log_dir: Path) -> RunLog:
    """Read the log of a run."""
    path = log_dir / "metrics.jsonl"
    # A last line without an end is being written, or was when the machine crashed.
    lines = read_text(path, "use the --log-dir of a run").split("\n")[:-1]
    attempts = _Attempts()
    for number, text in enumerate(lines, 1):
        line = read_object(text, f"{path}:{number}")
        check_line(line, f"{path}:{number}")
        check_same_run(line.get("run"), log_dir, f"{path}:{number}")
        attempts.add(line)
    if not attempts.steps:
        raise LogError(str(path), "has no step", code="log.no-steps")
    return RunLog(
        steps=tuple(attempts.steps),
        evaluations=tuple(attempts.evaluations),
        checkpoints=tuple(attempts.checkpoints),
        loads=tuple(attempts.loads[rank] for rank in sorted(attempts.loads)),
        peaks_nbytes=attempts.peaks_nbytes,
        begins=tuple(attempts.begins),
        traces=_read_traces(log_dir / "trace", run_id(log_dir)),
        record=read_run_record(log_dir),
    )


def read_text(path: Path, hint: str = "") -> str:
    """Read a text file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise refused_by_system(str(path), error, hint=hint, code="log.unreadable") from error
    except UnicodeDecodeError as error:
        raise LogError(str(path), f"is not UTF-8: {error.reason}", hint, code="log.not-utf8") from error


def read_object(text: str, where: str) -> Line:
    """Parse a JSON object, which may contain NaN and infinity."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LogError(where, f"is not JSON: {error}", code="log.not-json") from error
    if not isinstance(document, dict):
        raise LogError(where, f"expected an object, found {kind_of(document)}", code="log.not-an-object")
    return document


def check_line(line: Line, where: str) -> None:
    """Check that a line of metrics.jsonl has the required fields of its kind, with the right types."""
    for name, needed in _NEEDED.items():
        if name in line:
            check_fields(line, where, needed if "save_error" not in line else ())
            break
    check_fields(line, where)
    names = [name for name in (*_MEASURED, *_SIMULATED) if name in line]
    is_complete = "step_s" in line and names in ([*_MEASURED], [*_MEASURED, *_SIMULATED])
    if names and (not is_complete or len({len(line[name]) for name in names}) > 1):
        expected = f"{' and '.join(_MEASURED)}, and {' and '.join(_SIMULATED)} or none of them"
        problem = f"expected step_s, {expected}, of the same pipeline ranks"
        raise LogError(where, problem, code="log.bad-field")


def check_run(run: object, where: str) -> Line:
    """Check the description of the run in a trace."""
    if not isinstance(run, Mapping):
        raise LogError(f"{where}: run", f"expected an object, found {kind_of(run)}", code="log.bad-field")
    check_fields(run, f"{where}: run", ("schedule", "num_stages", "num_ranks", "style", "num_microbatches"))
    return run


def check_events(document: Line, run: Line, where: str) -> tuple[Line, ...]:
    """Return the actions of a rank on its stages, from its trace."""
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise LogError(f"{where}: traceEvents", f"expected a list, found {kind_of(events)}", code="log.bad-field")
    checked = []
    for number, event in enumerate(events):
        at = f"{where}: traceEvents[{number}]"
        if not isinstance(event, Mapping):
            raise LogError(at, f"expected an object, found {kind_of(event)}", code="log.bad-field")
        if event.get("ph") != "X":
            continue
        check_fields(event, at, ("ts", "dur", "tid", "args"))
        if event["tid"] < 0:  # a transfer
            continue
        check_fields(event["args"], f"{at}.args", ("step", "kind", "microbatch"))
        if event["tid"] >= run["num_stages"]:
            problem = f"expected a stage below {run['num_stages']}, found {event['tid']}"
            raise LogError(f"{at}.tid", problem, code="log.bad-field")
        checked.append(event)
    return tuple(checked)


class _Attempts:
    """Collects lines in order, and drops those that a later attempt has replaced."""

    def __init__(self) -> None:
        self.steps, self.evaluations, self.checkpoints = list[Line](), list[Line](), list[Line]()
        self.loads, self.peaks_nbytes = dict[int, Line](), dict[int, int]()
        self.begins: list[int] = []
        self._is_begun = False

    def add(self, line: Line) -> None:
        if "load_s" in line:
            if self._is_begun or line["rank"] in self.loads:  # another attempt
                self.loads, self.peaks_nbytes, self._is_begun = {}, {}, False
            self.loads[line["rank"]] = line
        elif "loss" in line:
            self._take(line)
        elif "eval_loss" in line:
            self.evaluations.append(line)
        elif "checkpoint" in line and "save_error" not in line:
            self.checkpoints.append(line)
        elif "rank" in line:
            self.peaks_nbytes[line["rank"]] = line["peak_nbytes"]

    def _take(self, line: Line) -> None:
        if not self._is_begun or line["step"] <= self.steps[-1]["step"]:
            for lines in (self.steps, self.evaluations, self.checkpoints):
                lines[:] = [before for before in lines if before["step"] < line["step"]]
            self.begins = [step for step in self.begins if step < line["step"]] + [line["step"]]
        self._is_begun = True
        self.steps.append(line)


def _read_traces(folder: Path, this_run: str) -> Traces | None:
    paths = sorted(path for path in folder.glob("rank-*.json") if path.stem.removeprefix("rank-").isdecimal())
    if not paths:
        return None
    documents = [read_object(read_text(path), str(path)) for path in paths]
    run = check_run(documents[0].get("run"), str(paths[0]))
    if any(document.get("run") != run for document in documents):
        hint = "remove the folder, and run with --trace again"
        raise LogError(str(folder), "contains traces of different runs", hint, code="log.mixed-traces")
    if this_run and run.get("run", this_run) not in (this_run, ""):
        return None  # of another run
    try:
        placement = Placement(num_stages=run["num_stages"], num_ranks=run["num_ranks"], style=run["style"])
    except InputError as error:
        raise error.within(f"{paths[0]}: run") from error
    if len(documents) % placement.num_ranks:
        return None  # a rank has not written its own yet, or was killed before
    # With data or tensor parallelism several ranks share their stages: one pipeline is shown.
    num_pipelines = len(documents) // placement.num_ranks
    shown = range(0, len(documents), num_pipelines)
    pipeline = [check_events(documents[at], run, str(paths[at])) for at in shown]
    # A killed run may have traced a step on some ranks only.
    steps = sorted(set.intersection(*({event["args"]["step"] for event in events} for events in pipeline)))
    if not steps:
        return None
    if placement.num_stages * run["num_microbatches"] > sum(map(len, pipeline)):
        problem = f"expected {run['num_microbatches']} microbatches on each of {placement.num_stages} stages"
        raise LogError(str(folder), problem, "remove the folder, and run with --trace again", code="log.mixed-traces")
    return Traces(
        folder=folder,
        ranks=tuple(int(paths[at].stem.removeprefix("rank-")) for at in shown),
        schedule=run["schedule"],
        placement=placement,
        num_microbatches=run["num_microbatches"],
        microbatch_group=run.get("microbatch_group"),
        steps=tuple(_step(step, pipeline) for step in steps),
    )


def _step(step: int, pipeline: Sequence[Sequence[Line]]) -> StepTrace:
    ranks = [[event for event in events if event["args"]["step"] == step] for events in pipeline]
    zero = min(event["ts"] for events in ranks for event in events)
    spans = tuple(
        tuple(_timed(event, zero) for event in sorted(events, key=lambda event: event["ts"])) for events in ranks
    )
    return StepTrace(
        step=step,
        zero_s=zero / 1e6,
        timeline=Timeline(
            ranks=spans,
            makespan_s=max(span.end_s for rank in spans for span in rank),
            busy_s=tuple(sum(span.end_s - span.start_s for span in rank) for rank in spans),
        ),
    )


def _timed(event: Line, zero: float) -> TimedAction:
    action = Action(event["tid"], event["args"]["kind"], event["args"]["microbatch"])
    start = event["ts"] - zero
    return TimedAction(action, start / 1e6, (start + event["dur"]) / 1e6)


def check_fields(line: Line, where: str, needed: Iterable[str] = ()) -> None:
    """Check the types of fields, and that those which are needed are there."""
    for name in needed:
        if name not in line:
            raise LogError(f"{where}: {name}", "is missing", code="log.bad-field")
    for name, value in line.items():
        expected, is_one = _FIELDS.get(name, _ANY)
        if not is_one(value):
            shown = repr(value)[:80] if isinstance(value, int | float | str) else kind_of(value)
            raise LogError(f"{where}: {name}", f"expected {expected}, found {shown}", code="log.bad-field")


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) < _MOST


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_number(value: object) -> bool:
    return type(value) is float or _is_integer(value)


def _is_finite(value: object) -> bool:
    return _is_number(value) and abs(value) < _MOST  # type: ignore[arg-type]


def _is_duration(value: object) -> bool:
    return _is_finite(value) and not math.isnan(value) and value >= 0  # type: ignore[arg-type, operator]


def _all_of(is_one: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_one, value))


_are_counts = _all_of(_is_count)


def _is_load(value: object) -> bool:
    return isinstance(value, Mapping) and all(name.isdecimal() and _are_counts(value[name]) for name in value)


_ANY = ("anything", lambda value: True)
_COUNT = ("a count", _is_count)
_NUMBER = ("a number", _is_number)  # or NaN, as a loss may be
_FINITE = ("a number", _is_finite)
_TEXT = ("a text", lambda value: isinstance(value, str))
_SECONDS = ("a list of seconds, of each pipeline rank", _all_of(_is_duration))
_FIELDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("step", "rank", "microbatch", "base_nbytes", "planned_nbytes", "peak_nbytes"), _COUNT),
    **dict.fromkeys(("loss", "grad_norm", "eval_loss", "aux_loss"), _NUMBER),
    **dict.fromkeys(("tokens_per_s", "step_s", "stall_s", "mfu", "ts", "time", *PARTS), _FINITE),
    **dict.fromkeys((*_MEASURED, *_SIMULATED), _SECONDS),
    **dict.fromkeys(("num_stages", "num_ranks", "num_microbatches"), ("a number from 1 up", _is_positive)),
    **dict.fromkeys(("schedule", "checkpoint", "save_error"), _TEXT),
    "microbatch_group": ("a number from 1 up or null", lambda value: value is None or _is_positive(value)),
    "stages": ("a list of stages", _are_counts),
    "style": ("loop or v", lambda value: value in ("loop", "v")),
    "dur": ("microseconds, 0 or more", _is_duration),
    "tid": ("a stage", _is_integer),
    "kind": (f"one of {', '.join(_KINDS)}", lambda value: value in tuple(_KINDS)),
    "expert_load": ("an object of counts by layer", _is_load),
    "args": ("an object", lambda value: isinstance(value, Mapping)),
}  # fmt: skip
# Required fields by the field that identifies the kind of a line; the first that a line has counts.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "load_s": ("rank", "stages"),
    "loss": ("step", "tokens_per_s"),
    "eval_loss": ("step",),
    "checkpoint": ("step", "stall_s"),
    "rank": ("peak_nbytes",),
}
