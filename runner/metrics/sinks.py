"""Sinks for a run's records: metrics.jsonl and, on request, TensorBoard event files and Weights & Biases.

All get the same records. None may stop training: the failure of a sink is logged once, and the run continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from runner.config.flags import TrainOptions
from runner.rundir.records import config_of, read_run_record

logger = logging.getLogger("runner")
Record = Mapping[str, Any]
_MOST = 10_000  # records that may wait for a sink
_COMPARED = ("loss", "eval_loss", "tokens_per_s")
_LAST_S = 60.0  # for uploads at the end of a run; `wandb sync` sends the rest


class Sink(Protocol):
    """Takes records, in order; an exception closes the sink, not the run."""

    name: str

    def write(self, record: Record) -> None: ...
    def close(self, exit_code: int) -> None: ...


class JsonLines:
    """Appends one JSON object per line. A line that cannot be written is left out, and later ones are tried."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.name, self._path, self._is_lossy = str(path), path, False
        self._open()

    def write(self, record: Record) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            if self._file.closed:
                self._open()
            if self._file.write(line) == len(line):
                self._end += len(line)
                return
            problem = "No space left on device"
            self._file.truncate(self._end)
        except OSError as error:
            problem = error.strerror or str(error)
            with contextlib.suppress(OSError):
                self._file.close()  # the next line opens it again: a file server may have lost the handle
        if not self._is_lossy:
            logger.warning("note: %s: %s; lines that cannot be written are left out", self.name, problem)
        self._is_lossy = True

    def close(self, exit_code: int) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open for the whole run
        self._end = _end_of_lines(self._path)  # a crash, or a write that failed, may have left half a line
        self._file.truncate(self._end)


class TensorBoard:
    """Writes event files for TensorBoard; records without a step are logged at the last step before them."""

    name = "--tensorboard"

    def __init__(self, folder: Path, first_step: int, config: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._step = first_step
        # Steps that are taken again, by a resumed run or one that starts over, are shown once.
        self._writer = SummaryWriter(folder, purge_step=first_step + 1)
        plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in config.items()}
        # The HParams page shows these metrics by run.
        for summary in hparams(plain, dict.fromkeys(_COMPARED, 0)):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]

    def write(self, record: Record) -> None:
        self._step = record.get("step", self._step)
        at = {"global_step": self._step, "walltime": record["time"]}
        for name, number in scalars_of(record):
            self._writer.add_scalar(name, number, **at)
        for name, text in texts_of(record):
            self._writer.add_text(name, text, **at)

    def close(self, exit_code: int) -> None:
        self._writer.close()


class WandB:
    """Logs to Weights & Biases, configured by its own variables: WANDB_MODE, WANDB_PROJECT, WANDB_RUN_ID."""

    name = "--wandb"

    def __init__(self, folder: Path, first_step: int, config: Record) -> None:
        import wandb

        self._step = first_step
        # wandb must not capture the console.
        settings = wandb.Settings(console="off", login_timeout=_LAST_S, finish_timeout=_LAST_S)
        self._run = wandb.init(dir=os.environ.get("WANDB_DIR", folder), config=dict(config), settings=settings)
        # An asynchronous checkpoint ends after later steps: the step is logged as a metric.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._step = record.get("step", self._step)
        self._run.log({**dict(scalars_of(record)), **dict(texts_of(record)), "step": self._step})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class Aside:
    """A sink that a thread opens and writes to: no rank waits for a service that does not answer."""

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name, self._open = name, open_sink
        self._records = queue.Queue[Record | int](_MOST)  # an exit code is the last
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._records.put_nowait(record)
        except queue.Full as error:
            raise TimeoutError(f"{_MOST} records are waiting to be written") from error

    def close(self, exit_code: int) -> None:
        """Wait until the remaining records are written, for a shorter time where the run has failed."""
        try:
            self._records.put_nowait(exit_code)
        except queue.Full:
            return
        limit_s = 10.0 if exit_code else _LAST_S + 10.0
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TimeoutError(f"did not finish within {limit_s:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            sink = self._open()
            while not isinstance(record := self._records.get(), int):
                sink.write(record)
            sink.close(record)
        except Exception as error:  # third-party code: the next write raises it
            self._failure = error


def open_sinks(options: TrainOptions, first_step: int) -> Iterator[Sink]:
    """Yield the requested sinks; all but metrics.jsonl are opened in the background."""
    yield JsonLines(options.log_dir / "metrics.jsonl")
    config = config_of(read_run_record(options.log_dir))
    if options.tensorboard:
        yield Aside(TensorBoard.name, partial(TensorBoard, options.log_dir / "tensorboard", first_step, config))
    if options.wandb:
        yield Aside(WandB.name, partial(WandB, options.log_dir, first_step, config))


def _end_of_lines(path: Path) -> int:
    """Return the number of bytes up to the end of a file's last whole line, which has at most 1 MiB."""
    with open(path, "rb") as stream:
        begin = max(0, stream.seek(0, os.SEEK_END) - (1 << 20))
        stream.seek(begin)
        return begin + stream.read().rfind(b"\n") + 1


def scalars_of(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by name: `bubble_s/3` of pipeline rank 3, `load_s/rank-3` of rank 3."""
    suffix = f"/rank-{record['rank']}" if "rank" in record else ""
    for name, value in record.items():
        if isinstance(value, int | float) and name not in ("step", "rank", "time"):
            yield name + suffix, value
        elif isinstance(value, tuple | list) and not suffix:
            yield from ((f"{name}/{position}", each) for position, each in enumerate(value))


def texts_of(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the texts of a record by name."""
    suffix = f"/rank-{record['rank']}" if "rank" in record else ""
    for name, value in record.items():
        if isinstance(value, str):
            yield name + suffix, value
        elif isinstance(value, tuple | list) and suffix:
            yield name + suffix, ", ".join(map(str, value))
