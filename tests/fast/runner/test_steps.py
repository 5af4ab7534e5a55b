"""What a step is timed with, and what it is not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from manifests.placement import Placement
from runner.config.flags import parse_training
from runner.metrics.metrics import Metrics
from runner.metrics.sinks import JsonLines
from runner.pipeline.timetable import Timetable
from runner.profiling.trace import Clock, Recorder, RunShape, Tracer, trace_path
from runner.steps import _Feed, _Steps
from runner.training.step import StepReport

NUM_ACTIONS = 20_000  # whose trace takes much longer to write than all else


def test_writing_a_trace_is_no_part_of_the_step_that_it_is_of(tmp_path: Path) -> None:
    device, recorder = torch.device("cpu"), Recorder(torch.device("cpu"))
    clock = Clock(Timetable(name="1F1B", placement=Placement(num_stages=1, num_ranks=1)).planned(1), 0)
    shape = RunShape(schedule="1F1B", num_stages=1, num_ranks=1, style="loop", num_microbatches=1)
    ready: Any = SimpleNamespace(
        options=parse_training(["--data", "synthetic", "--trace", "1", "--log-dir", str(tmp_path)]),
        mesh=SimpleNamespace(rank=0), chunks=[SimpleNamespace(device=device)],
        engine=SimpleNamespace(schedule=SimpleNamespace(recorder=recorder), clock=clock),
    )  # fmt: skip
    unused: Any = None
    with Metrics([JsonLines(tmp_path / "metrics.jsonl")]) as metrics:
        steps = _Steps(
            ready=ready, feed=_Feed(), metrics=metrics, saver=None, publisher=None, watchdog=unused,
            tracer=Tracer(tmp_path, 0, shape),
        )  # fmt: skip
        started_s = time.perf_counter()
        clock.note_data(0.0)
        recorder.start()
        for microbatch in range(NUM_ACTIONS):
            with recorder.action("F", 0, microbatch):
                pass
        recorder.stop()
        clock.note_exchange([clock.read(recorder)])
        ended_s = time.perf_counter()
        steps.report(1, StepReport(loss=1.0, num_tokens=1, grad_norm=1.0, lr=1.0), started_s)
        reported_s = time.perf_counter()
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert len(json.loads(trace_path(tmp_path, 0).read_text())["traceEvents"]) > NUM_ACTIONS
    assert line["step_s"] - (ended_s - started_s) < (reported_s - ended_s) / 2
