"""What a step is timed with, and what it is not; data that cannot be opened."""

from __future__ import annotations

import builtins
import json
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from manifests.errors import UnreachableError
from manifests.placement import Placement
from runner.bundle.packed import open_packed
from runner.checkpoint.resume import Origin
from runner.config.flags import parse_training
from runner.data.mixture import Cursor
from runner.data.packing import Sample
from runner.data.sequences import build_batch
from runner.distributed.watchdog import Watchdog
from runner.distributed.world import World
from runner.metrics.metrics import Metrics
from runner.metrics.sinks import JsonLines
from runner.pipeline.timetable import Timetable
from runner.profiling.trace import Clock, Recorder, RunShape, Tracer, trace_path
from runner.setup import begin
from runner.steps import _Feed, _open_feed, _Steps, train_steps
from runner.training.step import StepReport
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.runner.tiny import save_model

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


@pytest.mark.usefixtures("one_rank")
def test_disk_of_data_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model", num_hidden_layers=1)
    launched = open_packed(open_manifest(pack(tmp_path / "model", tmp_path / "packed", "pp=1")))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    flags = ["--data", str(rows), "--tokenized", "--shuffle", "--timeout", "1", "--no-self-check", "--log-dir"]
    options, world = parse_training([*flags, str(tmp_path / "log")]), World(rank=0, local_rank=0, size=1)
    ready = begin(launched, (Origin(launched.root),), options, world, torch.device("cpu"))
    answered, opened = threading.Event(), builtins.open

    def hang(file: Any, *args: Any, **named: Any) -> Any:
        if file == rows:
            answered.wait(60)
        return opened(file, *args, **named)

    monkeypatch.setattr(builtins, "open", hang)
    with pytest.raises(UnreachableError) as caught:
        _open_feed(ready)
    assert (caught.value.code, answered.is_set()) == ("store.stalled", False)
    answered.set()


@pytest.mark.parametrize(("flags", "expected"), [([], 3), (["--skip-bad-documents"], 5)])
def test_documents_skipped_before_are_still_counted_by_a_run_that_skips_none(
    flags: list[str], expected: int, tmp_path: Path
) -> None:
    cursor = Cursor(num_documents=0, num_tokens=0, sources=(), num_skipped=5 if flags else 0)
    batch = build_batch([Sample(ids=array("i", [1, 2]), cursor=cursor)], 2, 0)
    options = parse_training(["--data", "a.txt", *flags])
    reader: Any = SimpleNamespace(take=lambda: (batch, 0.0), thread_id=threading.get_ident())
    clock = SimpleNamespace(note_data=lambda waited_s: None)
    ready: Any = SimpleNamespace(options=options, mesh=SimpleNamespace(rank=0), engine=SimpleNamespace(clock=clock))
    feed, unused = _Feed(reader=reader, num_skipped=3), cast("Any", None)
    watchdog = AskedToStop(tmp_path, during=9)
    _Steps(
        ready=ready, feed=feed, metrics=unused, saver=None, publisher=None, watchdog=watchdog, tracer=None
    ).read()  # fmt: skip
    assert feed.num_skipped == expected


class AskedToStop(Watchdog):
    """A watchdog that has heard a signal during a step."""

    def __init__(self, log_dir: Path, during: int) -> None:
        super().__init__(log_dir, 0, [0], step_timeout_s=600, can_stop=True)
        self._during = during

    def beat(self, step: int, phase: str = "train") -> None:
        super().beat(step, phase)
        self.is_asked_to_stop |= step == self._during


@pytest.mark.usefixtures("one_rank")
def test_run_that_is_asked_to_stop_begins_no_evaluation(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=1)
    launched = open_packed(open_manifest(pack(tmp_path / "model", tmp_path / "packed", "pp=1")))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    flags = ["--data", str(rows), "--eval-data", str(rows), "--tokenized", "--seq-len", "8", "--global-batch", "1"]
    flags += ["--steps", "9", "--eval-every", "2", "--no-self-check", "--log-dir", str(tmp_path / "log")]
    options, world = parse_training(flags), World(rank=0, local_rank=0, size=1)
    ready = begin(launched, (Origin(launched.root),), options, world, torch.device("cpu"))
    with Metrics([JsonLines(tmp_path / "metrics.jsonl")]) as metrics:
        trained, is_stopped = train_steps(ready, metrics, None, None, AskedToStop(tmp_path, during=4))
    assert (trained.step, is_stopped) == (5, True)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "eval_loss" in line] == [2]
