"""What a rank ran: its actions, for metrics and Chrome traces, and what torch's own tools see of steps and of CUDA."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from manifests.schedules.actions import Action, Table, TracedKind, actions_of
from manifests.schedules.simulation import TimedAction
from manifests.store import write_file
from runner.profiling.step_times import DATA, KINDS, RankTimes, SplitProcess, split_step

logger = logging.getLogger("runner")
_SIMULATED_S = 3.1e-6  # of an action, at most: 2.0 to 2.6 us were measured on a core, with 4,096 and 131,072 actions
_MOST_S = 0.5e-3
_EVERY_ON_CUDA = 10
_UNTIMED = nullcontext()


class Recorder:
    """Times the actions of a rank; on a GPU with CUDA events, without synchronizing before the schedule has ended."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, self._is_timed = device.type == "cuda", True
        self._ran: list[tuple[Action, Any, Any]] = []
        self._losses = count()
        self._zero: Any = None
        self.begun_s = self.ended_s = 0.0  # of the schedule, in seconds of `time.perf_counter`

    def start(self, *, is_timed: bool = True) -> None:
        """Clear the recorded actions: a schedule begins. Its actions are recorded if it `is_timed`."""
        self._ran, self._losses, self._is_timed = [], count(), is_timed
        self._zero = self._now() if is_timed else None
        self.begun_s = time.perf_counter()

    def stop(self) -> None:
        """Note that the schedule has ended, if it is timed after synchronizing with the GPU."""
        is_synchronized, end = self._is_cuda and self._is_timed, self._now() if self._is_timed else None
        if is_synchronized:
            torch.cuda.synchronize()
        self.ended_s = time.perf_counter()
        if is_synchronized:  # the stream may have been behind when the schedule began, and is empty now
            self.begun_s = self.ended_s - float(self._zero.elapsed_time(end)) / 1e3

    def loss(self, stage: int, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the loss function with timing; its calls are for the microbatches in turn."""

        def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
            with self.action("L", stage, next(self._losses)):
                return loss(*args, **kwargs)

        return timed

    def action(self, kind: TracedKind, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return self._timing(Action(stage, kind, microbatch)) if self._is_timed else _UNTIMED

    @contextmanager
    def _timing(self, action: Action) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._ran.append((action, begin, self._now()))

    def take(self) -> tuple[TimedAction, ...]:
        """Return the actions between start and stop, in order, in seconds of `time.perf_counter`."""
        return tuple(TimedAction(action, self._seconds(begin), self._seconds(end)) for action, begin, end in self._ran)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, event: Any) -> float:
        if not self._is_cuda:
            return float(event)
        return self.begun_s + float(self._zero.elapsed_time(event)) / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShape:
    """What a trace records so that it can be compared with its plan."""

    schedule: str  # a name, or the path of a CSV file
    num_stages: int
    num_ranks: int
    style: str
    num_microbatches: int
    microbatch_group: int | None = None
    run: str = ""  # the run's id in run.json


def trace_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "trace" / f"rank-{rank:05d}.json"


def clear_traces(log_dir: Path) -> None:
    """Remove what an earlier attempt has traced, perhaps on more ranks: a report would mix it with what follows."""
    with suppress(OSError):  # as a trace that cannot be written
        for path in (log_dir / "trace").glob("rank-*.json"):
            path.unlink(missing_ok=True)


class Tracer:
    """Writes the actions of some steps as one rank's Chrome trace, in which ranks are processes and stages threads."""

    def __init__(self, log_dir: Path, rank: int, shape: RunShape) -> None:
        self._path, self._rank, self._shape = trace_path(log_dir, rank), rank, shape
        self._events: list[dict[str, Any]] = []
        self._is_lossy = False
        # The clocks of ranks agree as well as those of their nodes.
        self._epoch_s = time.time() - time.perf_counter()

    def add(self, step: int, recorder: Recorder) -> None:
        """Add a step that has just ended, counted from 1, and rewrite the trace file."""
        whole = self._event(f"step {step}", -1, recorder.begun_s, time.perf_counter(), {"step": step})
        self._events.append(whole)
        for (stage, kind, microbatch), begin_s, end_s in recorder.take():
            arguments = {"step": step, "kind": kind, "microbatch": microbatch}
            self._events.append(self._event(f"{kind}{microbatch}", stage, begin_s, end_s, arguments))
        try:
            self._write()
        except OSError as error:  # a failed trace must not end a run
            if not self._is_lossy:
                logger.warning("note: %s cannot be written: %s", self._path, error.strerror)
            self._is_lossy = True

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stages = sorted({event["tid"] for event in self._events})
        names = [self._named("process_name", 0, f"rank {self._rank}")]
        names += [self._named("thread_name", stage, f"stage {stage}" if stage >= 0 else "step") for stage in stages]
        document = {"traceEvents": [*names, *self._events], "run": asdict(self._shape), "displayTimeUnit": "ms"}
        write_file(self._path, json.dumps(document).encode(), is_durable=False)

    def _event(self, name: str, stage: int, begin_s: float, end_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": (self._epoch_s + begin_s) * 1e6, "dur": (end_s - begin_s) * 1e6}
        return {"name": name, "ph": "X", "pid": self._rank, "tid": stage, **times, "args": arguments}

    def _named(self, what: str, stage: int, name: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": self._rank, "tid": stage, "args": {"name": name}}


class Clock:
    """Measures a rank's step, and splits the steps of all ranks into parts; `table` has their actions.

    What is timed besides waiting for data is timed in every Nth step, and in those that are `traced`: on a GPU in
    every tenth at most, since its events are read after a synchronization.
    """

    def __init__(self, table: Table, rank: int, traced: Collection[int] = (), *, is_cuda: bool = False) -> None:
        self._traced, self.table, self._stages = traced, table, table.placement.stages_on(rank)
        self._data_s, self._exchanged_s = 0.0, 0.0
        self._window_s = 0.0  # between the last two exchanges
        self._rows: Sequence[Sequence[float]] = ()
        num_actions = sum(len(actions_of(step)) for steps in table.ranks for step in steps)
        every = 1 + int(num_actions * _SIMULATED_S / _MOST_S)
        self._every = max(_EVERY_ON_CUDA if is_cuda else 1, every)
        self._process = SplitProcess(table) if every > 1 else None

    @property
    def num_times(self) -> int:
        """How many numbers each rank exchanges."""
        return 5 + len(KINDS) * len(self._stages)

    def note_data(self, data_s: float) -> None:
        """Note that this rank has its batch, after waiting `data_s` seconds for it."""
        self._data_s = data_s
        if not self._exchanged_s:  # the first step, or the first after a pause
            self._exchanged_s = time.perf_counter() - data_s

    def pause(self) -> None:
        """Leave what follows, such as an evaluation, out of the next step."""
        self._exchanged_s = 0.0

    def read(self, recorder: Recorder) -> tuple[float, ...]:
        """Return this rank's numbers, once the schedule has ended and gradients are reduced."""
        now_s = time.perf_counter()
        seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
        for action, begin_s, end_s in recorder.take():
            seconds[action.stage, action.kind].append(end_s - begin_s)
        means = (_mean(seconds[stage, kind]) for stage in self._stages for kind in KINDS)
        return (
            recorder.begun_s - self._exchanged_s,
            self._data_s,
            sum(map(sum, seconds.values())),
            recorder.ended_s - recorder.begun_s,
            now_s - recorder.ended_s,
            *means,
        )

    def note_exchange(self, rows: Sequence[Sequence[float]]) -> None:
        """Note that all ranks have just exchanged their numbers."""
        now_s = time.perf_counter()
        self._window_s, self._exchanged_s = now_s - self._exchanged_s, now_s
        self._rows = rows

    def times(self, step: int) -> bool:
        """Return whether this step, counted from 1, is timed: so often that simulating it costs half a ms a step."""
        return (step - 1) % self._every == 0 or step in self._traced

    def data_s(self) -> tuple[float, ...]:
        """Return how long each pipeline rank waited for its batch of the last step."""
        return tuple(row[DATA] for row in self._rows)

    def split(self, step: int) -> tuple[RankTimes, ...]:
        """Return the parts of the step that has just ended of each pipeline rank; empty if it was not timed.

        Of a large schedule, they are those of an earlier step, once another process has simulated it.
        """
        if self._process is None:
            return split_step(self.table, self._rows, self._window_s) if self.times(step) else ()
        if self.times(step):
            self._process.submit(self._rows, self._window_s)
        return self._process.take()


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0


_MOST_EVENTS = 1_000_000  # allocations and frees, the last ones; torch's default has no limit


def profile_folder(log_dir: Path) -> Path:
    return log_dir / "profile"


@contextmanager
def profiled(log_dir: Path, rank: int, step: int, device: torch.device) -> Iterator[None]:
    """Write the operators and kernels of a step, counted from 1, as a Chrome trace: a file for each rank and step."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints that it begins and ends
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as kernels:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path = profile_folder(log_dir) / f"rank-{rank:05d}-step-{step:06d}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kernels.export_chrome_trace(str(path))
    except OSError as error:  # it must not end a run
        logger.warning("note: %s cannot be written: %s", path, error.strerror)


@contextmanager
def memory_snapshot(log_dir: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Record what CUDA allocates, and write it at the end, also of a rank that fails, for pytorch.org/memory_viz."""
    if device.type != "cuda":
        if rank == 0:
            logger.warning("note: --memory-snapshot has no effect on the CPU")
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)  # documented, for all its underscore
    path = profile_folder(log_dir) / f"memory-{rank:05d}.pickle"
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:  # after an error of CUDA, which is what the rank reports
            logger.warning("note: %s cannot be written: %s", path, getattr(error, "strerror", error))
