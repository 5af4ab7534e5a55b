"""Event files and runs of Weights & Biases have what metrics.jsonl has, read back by those who made the formats."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from wandb.proto import wandb_internal_pb2

from manifests.errors import UsageError
from runner.config.flags import parse_training
from runner.metrics.metrics import Metrics
from runner.metrics.sinks import Aside, JsonLines, TensorBoard, WandB, open_sinks, scalars_of, texts_of
from runner.preflight.combinations import check_sinks
from tests.fast.runner.metrics.test_metrics import tell_all

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of tensorboard's and wandb's own imports
    # tensorboard's own thread raises what it also tells who writes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.timeout(60),
]


CONFIG = {"lr": 0.5, "self_check": True, "manifest": "/packed", "version/torch": "2.13.0", "stages": [0, 1]}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_event_files_have_every_number_and_word_of_metrics_jsonl(tmp_path: Path) -> None:
    with Metrics([JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "events", 3, CONFIG)]) as metrics:
        tell_all(metrics)
    read = EventAccumulator(str(tmp_path / "events"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    found = {name: [(e.step, e.value, e.wall_time) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}
    expected: dict[str, list[Any]] = {}
    words, step = [], 3
    for line in lines_of(tmp_path / "metrics.jsonl"):
        step = line.get("step", step)
        for name, number in scalars_of(line):
            expected.setdefault(name, []).append((step, pytest.approx(number), line["time"]))
        words += [(name, step, text) for name, text in texts_of(line)]
    assert found == expected
    assert {"loss", "bubble_s/1", "load_s/rank-1", "peak_nbytes/rank-0", "eval_loss"} <= found.keys()
    for name, at, text in words:
        events = read.Tensors(f"{name}/text_summary")
        assert (at, text) in [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]
    (begun,) = (
        HParamsPluginData.FromString(content).session_start_info
        for name, content in read.PluginTagToContent("hparams").items()
        if name.endswith("session_start_info")
    )
    shown = {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in begun.hparams.items()}
    assert shown == {**CONFIG, "stages": "[0, 1]"}


@pytest.mark.parametrize(("first_step", "shown"), [(0, [1]), (1, [1, 2])])
def test_steps_that_are_taken_again_are_shown_once(tmp_path: Path, first_step: int, shown: list[int]) -> None:
    def write(first_step: int, *steps: int) -> None:
        sink = TensorBoard(tmp_path, first_step, CONFIG)
        for step in steps:
            sink.write({"step": step, "loss": 1.0, "time": time.time()})
        sink.close(0)

    write(0, 1, 2, 3)
    time.sleep(1.1)  # event files are read in the order of their seconds
    write(first_step, first_step + 1)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == shown


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep wandb from the network, and from what this machine may have set."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def logged_in(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Give a run's config, and what it has logged to Weights & Biases, once its service has written the end of it."""
    deadline = time.monotonic() + 30
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in records_of(run.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            break
        assert time.monotonic() < deadline, "the run has no end"
        time.sleep(0.1)
    (begun,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {update.key: json.loads(update.value_json) for update in begun.config.update}
    return config, [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def records_of(data: bytes) -> Iterator[bytes]:
    """Give the whole records of a log in LevelDB's format, behind the seven bytes that Weights & Biases puts before it.

    Source: LevelDB, doc/log_format.md: blocks of 32 KiB; of each part checksum (4), length (2), type (1) and data.
    """
    assert data[:4] in (b"", b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # too few for a part: zeros
            at += (1 << 15) - at % (1 << 15)
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.usefixtures("offline")
def test_offline_run_of_wandb_has_every_number_and_word_of_metrics_jsonl(tmp_path: Path) -> None:
    with Metrics([JsonLines(tmp_path / "metrics.jsonl"), WandB(tmp_path, 3, CONFIG)]) as metrics:
        tell_all(metrics)
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    expected, step = [], 3
    for line in lines_of(tmp_path / "metrics.jsonl"):
        step = line.get("step", step)
        expected.append({**dict(scalars_of(line)), **dict(texts_of(line)), "step": step})
    config, history = logged_in(run)
    found = [{name: value for name, value in line.items() if not name.startswith("_")} for line in history]
    assert found == expected
    assert {name: config.get(name) for name in CONFIG} == CONFIG


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_package_that_is_not_installed_is_named_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse_training(["--data", "synthetic", f"--{name}"])
    check_sinks(options)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as error:
        check_sinks(options)
    found = (error.value.code, error.value.where, error.value.hint)
    assert found == ("system.missing-package", f"--{name}", f"pip install 'reshard[{name}]'")
    check_sinks(parse_training(["--data", "synthetic"]))


def test_sink_that_cannot_be_opened_is_said_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder would be")
    options = parse_training(["--data", "synthetic", "--tensorboard", "--log-dir", str(tmp_path)])
    with Metrics(open_sinks(options, 0)) as metrics:
        tell_all(metrics)
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 9
    (said,) = caplog.messages
    assert said.startswith("note: --tensorboard failed")
    assert "[Errno 17] File exists: " in said


def test_sink_that_takes_long_to_open_keeps_nobody_waiting_and_gets_all_records(tmp_path: Path) -> None:
    may_open = threading.Event()

    def open_late() -> JsonLines:
        may_open.wait()
        return JsonLines(tmp_path / "late.jsonl")

    with Metrics([JsonLines(tmp_path / "metrics.jsonl"), Aside("--late", open_late)]) as metrics:
        tell_all(metrics)
        may_open.set()
    assert (tmp_path / "late.jsonl").read_text() == (tmp_path / "metrics.jsonl").read_text()


@pytest.fixture
def limited() -> Iterator[int]:
    """Let no file of this process grow beyond some bytes: a disk that is full."""
    limit, before = 4096, resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_lines_that_the_disk_has_no_room_for_are_left_out_whole_and_said_once(
    tmp_path: Path, limited: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics([JsonLines(path)]) as metrics:
        for _ in range(8):
            tell_all(metrics)
    assert limited - 1000 < path.stat().st_size <= limited
    assert lines_of(path)  # each of them is JSON
    (said,) = caplog.messages
    assert said.startswith(f"note: {path}: ")
    assert said.endswith("; lines that cannot be written are left out")


def test_line_that_a_disk_fails_to_write_is_left_out_and_later_ones_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics([sink := JsonLines(path)]) as metrics:
        metrics.evaluation(1, 0.5, 1)
        with open(path, "ab") as file, open(os.devnull, "rb") as lost:
            file.write(b'{"st')
            os.dup2(lost.fileno(), sink._file.fileno())  # which can be neither written nor truncated
        for step in (2, 3, 4):
            metrics.evaluation(step, 0.5, 1)
    assert [line["step"] for line in lines_of(path)] == [1, 3, 4]
    (said,) = caplog.messages
    assert said.startswith(f"note: {path}: {os.strerror(errno.EBADF)}; ")


def test_line_that_a_dying_machine_left_half_is_cut_off_when_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with Metrics([JsonLines(path)]) as metrics:
        metrics.evaluation(2, 0.5, 1)
    first, second = lines_of(path)
    assert (first, second["step"]) == ({"step": 1}, 2)
