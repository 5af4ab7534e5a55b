"""Where a run's records go: metrics.jsonl, and, when asked for, TensorBoard's event files and Weights & Biases.

All are given the same records. None may end a training: what a sink meets is said once, and the run goes on.
"""

from __future__ import annotations

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

__all__ = ["Aside", "JsonLines", "Sink", "TensorBoard", "WandB", "open_sinks", "scalars_of", "texts_of"]

logger = logging.getLogger("runner")
Record = Mapping[str, Any]
_MOST = 10_000  # records that wait for a sink
_LAST_S = 60.0  # at the end of a run, for what is still to be uploaded; `wandb sync` sends the rest


class Sink(Protocol):
    """Takes records, in order; what it raises is its end, not the run's."""

    name: str

    def write(self, record: Record) -> None: ...
    def close(self, exit_code: int) -> None: ...


class JsonLines:
    """Appends one JSON object a line. A line that does not fit on the disk is left out, and later ones are tried."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.name, self._path, self._is_lossy = str(path), path, False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - held for the whole run
        self._end = _end_of_lines(path)  # a machine that died may have left half a line
        self._file.truncate(self._end)

    def write(self, record: Record) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            if self._file.write(line) == len(line):
                self._end += len(line)
                return
            problem = "No space left on device"
        except OSError as error:
            problem = error.strerror or str(error)
        self._file.truncate(self._end)
        if not self._is_lossy:
            logger.warning("note: %s: %s; lines that cannot be written are left out", self.name, problem)
        self._is_lossy = True

    def close(self, exit_code: int) -> None:
        self._file.close()


class TensorBoard:
    """Writes event files that TensorBoard shows; records without a step stand at the last one before them."""

    name = "--tensorboard"

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = first_step
        # Steps that an earlier attempt took, and this one takes again, are shown once.
        self._writer = SummaryWriter(folder, purge_step=first_step + 1 if first_step else None)

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
    """Logs to a run of Weights & Biases, which its own variables steer: WANDB_MODE, WANDB_PROJECT, WANDB_RUN_ID."""

    name = "--wandb"

    def __init__(self, folder: Path, first_step: int) -> None:
        import wandb

        self._step = first_step
        # Whatever is printed stays where it is printed.
        settings = wandb.Settings(console="off", login_timeout=_LAST_S, finish_timeout=_LAST_S)
        self._run = wandb.init(dir=os.environ.get("WANDB_DIR", folder), settings=settings)
        # A checkpoint ends steps after the one that it is of: the step is a value like others.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._step = record.get("step", self._step)
        self._run.log({**dict(scalars_of(record)), **dict(texts_of(record)), "step": self._step})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class Aside:
    """A sink that another thread opens and writes to: no rank waits for a service that does not answer."""

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
            raise TimeoutError(f"{_MOST} records wait to be taken") from error

    def close(self, exit_code: int) -> None:
        """Wait for what is left to be written, though not for long where the run has failed or is to end soon."""
        try:
            self._records.put_nowait(exit_code)
        except queue.Full:
            return
        limit_s = 10.0 if exit_code else _LAST_S + 10.0
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TimeoutError(f"has not ended within {limit_s:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            sink = self._open()
            while not isinstance(record := self._records.get(), int):
                sink.write(record)
            sink.close(record)
        except Exception as error:  # of other people's code: who writes next learns of it
            self._failure = error


def open_sinks(options: TrainOptions, first_step: int) -> Iterator[Sink]:
    """Give the sinks that were asked for; all but metrics.jsonl are opened while the run goes on."""
    yield JsonLines(options.log_dir / "metrics.jsonl")
    if options.tensorboard:
        yield Aside(TensorBoard.name, partial(TensorBoard, options.log_dir / "tensorboard", first_step))
    if options.wandb:
        yield Aside(WandB.name, partial(WandB, options.log_dir, first_step))


def _end_of_lines(path: Path) -> int:
    """Give the bytes of a file up to the end of its last whole line, which is no longer than a MiB."""
    with open(path, "rb") as stream:
        begin = max(0, stream.seek(0, os.SEEK_END) - (1 << 20))
        stream.seek(begin)
        return begin + stream.read().rfind(b"\n") + 1


def scalars_of(record: Record) -> Iterator[tuple[str, float]]:
    """Give the numbers of a record by name: `bubble_s/3` of pipeline rank 3, `load_s/rank-3` of rank 3."""
    suffix = f"/rank-{record['rank']}" if "rank" in record else ""
    for name, value in record.items():
        if isinstance(value, int | float) and name not in ("step", "rank", "time"):
            yield name + suffix, value
        elif isinstance(value, tuple | list) and not suffix:
            yield from ((f"{name}/{position}", each) for position, each in enumerate(value))


def texts_of(record: Record) -> Iterator[tuple[str, str]]:
    """Give what of a record is no number."""
    suffix = f"/rank-{record['rank']}" if "rank" in record else ""
    for name, value in record.items():
        if isinstance(value, str):
            yield name + suffix, value
        elif isinstance(value, tuple | list) and suffix:
            yield name + suffix, ", ".join(map(str, value))
