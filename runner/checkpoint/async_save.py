"""Work beside training, one piece at a time: checkpoints, for which training pauses only while the state is copied."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch.distributed as dist

from manifests.errors import UserError
from manifests.schema import TrainingState
from runner.checkpoint.history import checkpoint_path, prune, set_aside
from runner.checkpoint.save import SaveContext, save
from runner.checkpoint.state import Held, HostCopy
from runner.config.schema import CheckpointOptions
from runner.distributed.fail_together import OneRankError, ReadError
from runner.distributed.rounds import in_rounds
from runner.distributed.watchdog import StallTimer
from runner.distributed.world import same_gpu


class _Report(Protocol):
    @property
    def failure(self) -> UserError | None: ...


ReportT = TypeVar("ReportT", bound=_Report)


class InFlight(Generic[ReportT]):
    """A thread, what runs in it, and the reports of what has ended.

    Every rank creates one, begins the same work, and uses it as a context manager. Leaving the context waits for the
    work in flight, unless a rank is lost.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=same_gpu())  # it pins memory
        self._running: Future[ReportT] | None = None
        self._is_awaited = threading.Event()
        self._reports: list[ReportT] = []
        self.failure: UserError | None = None  # of the newest that has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        all_know = error is None or (isinstance(error, UserError) and not isinstance(error, OneRankError))
        self._is_awaited.set()
        # Data that cannot be read ends no save: the threads of other ranks continue until this one exits.
        self._pool.shutdown(wait=all_know or isinstance(error, ReadError))

    def reports(self, *, wait: bool = False) -> tuple[ReportT, ...]:
        """Return what has ended since the last call; with `wait`, also what is in flight."""
        if wait or (self._running is not None and self._running.done()):
            self._wait()
        ended, self._reports = tuple(self._reports), []
        return ended

    def _begin(self, work: Callable[..., ReportT], *args: Any) -> None:
        assert self._running is None, "the work before has ended"
        self._running = self._pool.submit(work, *args)

    def _wait(self) -> None:
        if self._running is not None:
            self._is_awaited.set()
            ended, self._running = self._running.result(), None
            self._is_awaited.clear()
            self._reports.append(ended)
            self.failure = ended.failure


logger = logging.getLogger("runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """The result of one save: its bytes over all ranks, and this rank's seconds.

    `failure` is the same on every rank; a failed save leaves earlier checkpoints untouched.
    """

    path: Path
    step: int
    nbytes: int
    stall_s: float  # training paused for so long, including the wait for the previous save
    save_s: float  # from then until the commit
    failure: UserError | None


class Saver(InFlight[SaveReport]):
    """Saves the state of all ranks, one checkpoint at a time.

    # Note [Asynchronous saves]
    A thread on each rank writes, and these threads coordinate the commit over a separate process group:
    training runs no collective for a save, and waits for a disk only if the previous save has not ended.
    While cores are busy, hashing and writing take a twentieth of one, see Note [Yielding without priorities], for as
    long as 128 MiB/s allow, or until training waits for the save. The threads exchange their progress while they
    write, so `timeout` does not limit a save that makes progress.

    Every rank calls `save` after the same steps.
    """

    def __init__(
        self,
        context: SaveContext,
        options: CheckpointOptions,
        state: Held,
        timeout: timedelta,
        timer: StallTimer | None = None,
        before: Path | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("save")
        self._context, self._options, self._timer = context, options, timer or StallTimer()
        self._before = before  # the checkpoint of this run that the next one shares files with
        self._check = check  # on rank 0: no other run has taken the folder over
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        # Allocating takes long: it is done during the first steps.
        self._copy = self._pool.submit(HostCopy, state) if options.is_async else None

    def reports(self, *, wait: bool = False) -> tuple[SaveReport, ...]:
        """Return as `InFlight` does; what failed in allocating memory is raised here, and not at the first save."""
        if self._copy is not None and self._copy.done():
            self._copy.result()
        return super().reports(wait=wait)

    def save(
        self,
        state: Held,
        training: TrainingState,
        data_files: Mapping[str, bytes] | None = None,
        steps: Mapping[str, int] | None = None,
    ) -> None:
        """Save a checkpoint after a step; `training` has this rank's RNG state, `steps` its differing step counts."""
        started_s = time.perf_counter()
        self._wait()
        if self._copy is not None:
            state = self._copy.result().fill(state)
        self._begin(self._save, state, training, data_files, steps, started_s, time.perf_counter())
        if self._copy is None:
            self._wait()

    def _save(
        self,
        state: Held,
        training: TrainingState,
        data_files: Mapping[str, bytes] | None,
        steps: Mapping[str, int] | None,
        started_s: float,
        copied_s: float,
    ) -> SaveReport:
        path, nbytes, failure = checkpoint_path(self._options.history, training.step), 0, None
        try:
            in_rounds("save", partial(self._make_room, path), self._group)
            nbytes = save(
                state, self._context, path, training,
                data_files=data_files, steps=steps, group=self._group, timer=self._timer,
                is_awaited=self._is_awaited.is_set, before=self._before, check=self._check,
            )  # fmt: skip
            self._before = path
        except UserError as error:
            failure = error
        ended_s = time.perf_counter()
        if failure is None and self._options.keep is not None:
            pruning = partial(prune_older, path, self._options, self._context, self._timer, self._check)
            in_rounds("prune", pruning, self._group)
        return SaveReport(
            path=path,
            step=training.step,
            nbytes=nbytes,
            stall_s=(copied_s if self._copy is not None else ended_s) - started_s,
            save_s=ended_s - copied_s,
            failure=failure,
        )

    def _make_room(self, path: Path, stop: threading.Event) -> None:
        """Set what is there aside, on rank 0: a checkpoint is damaged, or the run would have resumed from it."""
        if dist.get_rank() == 0:
            with self._timer.working():
                self._check()
                set_aside(path)


def prune_older(
    newest: Path, options: CheckpointOptions, context: SaveContext, timer: StallTimer, check: Callable[[], None],
    stop: threading.Event,
) -> None:  # fmt: skip
    """Prune older checkpoints, on rank 0; the others do not time out meanwhile, see Note [A disk that hangs]."""
    if options.keep is None or dist.get_rank() != 0:
        return
    try:
        with timer.working():
            check()
            prune(options.history, newest, options.keep, (context.root, context.named), timer.beat)
    except UserError as error:
        logger.error("error: %s", error)
