"""What a rank really computed, action by action: times for the metrics, and traces that Perfetto opens."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

__all__ = ["Ran", "RanKind", "Recorder", "RunShape", "Tracer", "trace_path"]

logger = logging.getLogger("runner")

# Forward, whole backward, gradients of the input, gradients of the weights, loss.
RanKind = Literal["F", "B", "I", "W", "L"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """An action that a rank has run, between two moments of its own clock."""

    kind: RanKind
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShape:
    """What a trace must say to be held against its plan."""

    schedule: str  # a name, or the path of a file
    num_stages: int
    num_ranks: int
    style: str
    num_microbatches: int
    run: str = ""  # the run's name in run.json


class Recorder:
    """Times what a rank computes. On a GPU, events of its own queue are timed, and nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ran: list[tuple[RanKind, int, int, Any, Any]] = []
        self._losses = count()
        self._zero: Any = None
        self.begun_s = self.ended_s = 0.0  # of the schedule, in seconds of `time.perf_counter`

    def start(self) -> None:
        """Forget what was run: a schedule begins."""
        self._ran, self._losses = [], count()
        self._zero = self._now()
        self.begun_s = time.perf_counter()

    def stop(self) -> None:
        """Note that the schedule has ended; waits for a GPU to end it."""
        end = self._now()
        if self._is_cuda:
            torch.cuda.synchronize()
        self.ended_s = time.perf_counter()
        if self._is_cuda:  # the queue may have been behind when the schedule began, and is empty now
            self.begun_s = self.ended_s - float(self._zero.elapsed_time(end)) / 1e3

    def loss(self, stage: int, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Give a loss function that is timed, as that of one microbatch after the other."""

        def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
            with self.action("L", stage, next(self._losses)):
                return loss(*args, **kwargs)

        return timed

    @contextmanager
    def action(self, kind: RanKind, stage: int, microbatch: int) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._ran.append((kind, stage, microbatch, begin, self._now()))

    def take(self) -> tuple[Ran, ...]:
        """Give what was run from the start to the stop, in order, in seconds of `time.perf_counter`."""
        return tuple(
            Ran(kind=kind, stage=stage, microbatch=microbatch, begin_s=self._seconds(begin), end_s=self._seconds(end))
            for kind, stage, microbatch, begin, end in self._ran
        )

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if not self._is_cuda:
            return float(moment)
        return self.begun_s + float(self._zero.elapsed_time(moment)) / 1e3


def trace_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "trace" / f"rank-{rank:05d}.json"


class Tracer:
    """Writes the actions of some steps as one rank's Chrome trace: a process a rank, a thread a stage."""

    def __init__(self, log_dir: Path, rank: int, shape: RunShape) -> None:
        self._path, self._rank, self._shape = trace_path(log_dir, rank), rank, shape
        self._events: list[dict[str, Any]] = []
        self._is_lossy = False
        # Clocks of ranks agree as well as those of their machines do.
        self._epoch_s = time.time() - time.perf_counter()

    def add(self, step: int, recorder: Recorder) -> None:
        """Add a step that ends now, the first being 1, and write the trace so far in place of an earlier one."""
        whole = self._event(f"step {step}", -1, recorder.begun_s, time.perf_counter(), {"step": step})
        self._events.append(whole)
        for action in recorder.take():
            arguments = {"step": step, "kind": action.kind, "microbatch": action.microbatch}
            name = f"{action.kind}{action.microbatch}"
            self._events.append(self._event(name, action.stage, action.begin_s, action.end_s, arguments))
        try:
            self._write()
        except OSError as error:  # a trace ends no run
            if not self._is_lossy:
                logger.warning("note: %s cannot be written: %s", self._path, error.strerror)
            self._is_lossy = True

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stages = sorted({event["tid"] for event in self._events})
        names = [self._named("process_name", 0, f"rank {self._rank}")]
        names += [self._named("thread_name", stage, f"stage {stage}" if stage >= 0 else "step") for stage in stages]
        document = {"traceEvents": [*names, *self._events], "run": asdict(self._shape), "displayTimeUnit": "ms"}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(document))
        partial.replace(self._path)

    def _event(self, name: str, stage: int, begin_s: float, end_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": (self._epoch_s + begin_s) * 1e6, "dur": (end_s - begin_s) * 1e6}
        return {"name": name, "ph": "X", "pid": self._rank, "tid": stage, **times, "args": arguments}

    def _named(self, what: str, stage: int, name: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": self._rank, "tid": stage, "args": {"name": name}}
