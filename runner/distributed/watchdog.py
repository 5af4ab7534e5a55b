"""Watchdog of a rank: signals that ask it to stop, its heartbeat, and a timeout for steps that hang.

# Note [Stopping]
SIGUSR2, SIGTERM, SIGINT and SIGHUP ask a run that saves checkpoints to stop. Ranks receive them at different times,
and torchrun forwards them again: a signal only sets a flag, which is reduced with the totals of every step, so that
all ranks stop after the same one. torchrun also sends SIGTERM to the remaining ranks when one has exited; then no step
ends, and the watchdog soon ends the rank, unless the agent was asked to stop the whole job: a step may be slow. A rank
that is killed then leaves no report, and the others of its node wait for --timeout. Python runs no signal handler while
a collective waits, so a separate thread listens.

# Note [Flight recorder]
torch keeps the last collectives of each rank in memory. It dumps them when NCCL times out, but not for gloo, nor when a
step hangs for another reason: then the watchdog does. `torchfrtrace LOG_DIR/flight-recorder` shows which ranks joined
which collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import NoReturn

from manifests.errors import RankError, UserError, system_errors
from runner.rundir.exit_report import ExitReport, FailureKind, is_stopping, place_of, report_exit
from runner.rundir.records import ALIVE_S, Beat, heartbeat_path, log_path, write_beat

logger = logging.getLogger("runner")
_GRACE_S = 15.0  # after SIGTERM, the rank exits unless a step ends within this, or twice the last step's time
_STOPPING = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.5
_BEAT_S = 1.0  # the shortest time between two heartbeats
# Each with the names that torch 2.13 reads, in order of precedence.
# Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp.
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_NUM_ENTRIES = 2000
# Where ranks wait for others, in functions of any name. Much else below a folder called `distributed` computes, such as
# transformers' tensor parallelism.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py", "runner/distributed/",
)  # fmt: skip
_CALLS_OPERATORS = "torch/_ops.py"  # for functions of torch.ops, such as `wait_tensor`
_LIMIT_S = 5.0


class StoppedError(UserError):
    """The run was stopped by a signal, after saving a checkpoint."""

    exit_code = 130


class StallTimer:
    """Measures how long another thread has made no progress: a disk that does not answer never raises."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        self._last_s: float | None = None  # None: no work is under way

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Measure while the block runs."""
        self.beat()
        try:
            yield
        finally:
            self._last_s = None

    def beat(self, stop: threading.Event | None = None) -> None:
        """Note that there was progress.

        Raises:
            CancelledError: `stop` is set: there should be no more.
        """
        self._last_s = time.monotonic()
        if stop is not None and stop.is_set():
            raise CancelledError

    @property
    def stalled_s(self) -> float:
        """Seconds since the last progress; 0 while no work is under way."""
        last_s = self._last_s
        return 0.0 if last_s is None else time.monotonic() - last_s

    @property
    def is_stalled(self) -> bool:
        """Whether the last progress was longer ago than the limit."""
        return self.stalled_s > self._limit_s


class Watchdog:
    """Watches over one rank while the context is entered, by its main thread.

    With `can_stop`, signals set `is_asked_to_stop` instead of ending the process. A rank that waits for its checkpoint,
    or until what it loaded is verified, exits when one of `saving` is stalled.
    """

    def __init__(
        self, log_dir: Path, rank: int, stages: Sequence[int], *, step_timeout_s: float, can_stop: bool,
        saving: Sequence[StallTimer] = (),
    ) -> None:  # fmt: skip
        self._log_dir, self._rank, self._stages, self._host = log_dir, rank, tuple(stages), socket.gethostname()
        self._step_timeout_s, self._can_stop = step_timeout_s, can_stop
        self._saving = tuple(saving)
        self.is_asked_to_stop = False
        self._terminated_s: float | None = None
        self._step, self._phase, self._last_s = 0, "begin", time.monotonic()
        self._took_s: float | None = None
        self._shown_s = self._written_s = 0.0
        self._ended, self._main = threading.Event(), threading.get_ident()
        self._awaited: int | None = None  # the thread that the main thread waits for
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._writer = threading.Thread(target=self._write_beats, name="heartbeat", daemon=True)

    def __enter__(self) -> Watchdog:
        with contextlib.suppress(OSError):  # as in `_write`
            heartbeat_path(self._log_dir, self._rank).parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.settimeout(_POLL_S)
        self._sender.setblocking(False)
        if self._can_stop:
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            for number in _STOPPING:
                signal.signal(number, lambda *_: None)
        self._thread.start()
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._writer.join(_LIMIT_S)  # a hanging disk may block it
        if self._can_stop:
            signal.set_wakeup_fd(-1)
        self._receiver.close()
        self._sender.close()

    def beat(self, step: int, phase: str = "train") -> None:
        """Note that a step has ended, or that another phase begins; only steps of `train` have a timeout."""
        now_s = time.monotonic()
        if self._phase == "train" and step > self._step:
            self._took_s = now_s - self._last_s
        self._step, self._phase, self._last_s = step, phase, now_s

    @contextlib.contextmanager
    def waiting_for(self, thread: int | None) -> Iterator[None]:
        """Report what another thread of this rank does while the main thread waits for it."""
        self._awaited = thread
        try:
            yield
        finally:
            self._awaited = None

    def leave(self) -> None:
        """Note that no step follows, for whatever reason: only the checkpoint can still be waited for."""
        self.beat(self._step, "end")

    @property
    def grace_s(self) -> float:
        """How long a step may take after SIGTERM, estimated from the last step."""
        return self._step_timeout_s if self._took_s is None else max(_GRACE_S, 2 * self._took_s)

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether no step ends any more since a SIGTERM that was not one to the whole job."""
        if self._terminated_s is None or time.monotonic() - max(self._terminated_s, self._last_s) <= self.grace_s:
            return False
        return not is_stopping()

    def _watch(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):  # `select` takes no descriptor from 1024 up, of many connections
                self._note(self._receiver.recv(64))
            now_s = time.monotonic()
            if self._phase != "train":
                stalled_s = max((timer.stalled_s for timer in self._saving if timer.is_stalled), default=0.0)
                if stalled_s:
                    why = f"no progress in saving or verifying for {stalled_s:.0f} s: a disk or bucket does not answer"
                    self._end(why, kind="failed", error_code="checkpoint.stalled")
                continue
            if self.has_lost_a_rank:
                self._end(f"no step has ended in the {self.grace_s:.0f} s since SIGTERM: another rank has exited")
            if now_s - self._last_s > self._step_timeout_s:
                self._end(f"no step has ended for {self._step_timeout_s:.0f} s")
            # Other ranks may time out first and end this one before it has dumped its stacks.
            if self._last_s > self._shown_s and now_s - self._last_s > self._step_timeout_s / 4:
                self._show(f"no step has ended for {now_s - self._last_s:.0f} s")

    def _note(self, numbers: bytes) -> None:
        if any(number in numbers for number in _STOPPING):
            self.is_asked_to_stop = True
        if any(number in numbers for number in _STOPPING if number != signal.SIGUSR2) and self._terminated_s is None:
            self._terminated_s = time.monotonic()

    def _write_beats(self) -> None:
        """Write heartbeats, in a thread of their own: a log folder whose disk hangs must not keep the watchdog."""
        while not self._ended.wait(_POLL_S):
            if time.monotonic() - self._written_s >= (_BEAT_S if self._last_s > self._written_s else ALIVE_S):
                self._write()
        self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        doing, is_waiting = _doing(self._awaited or self._main)
        beat = Beat(
            rank=self._rank, stages=self._stages, host=self._host, pid=os.getpid(), step=self._step,
            phase=self._phase, time=time.time(), doing=doing, is_waiting=is_waiting,
        )  # fmt: skip
        with contextlib.suppress(OSError):  # whatever must be written reports a full disk
            write_beat(heartbeat_path(self._log_dir, self._rank), beat)

    def _show(self, why: str) -> None:
        """Write the stack of every thread to this rank's log."""
        self._shown_s = time.monotonic()

        def write() -> None:
            with contextlib.suppress(OSError), open(log_path(self._log_dir, self._rank), "a") as log:
                print(f"{why}; stacks of all threads:", file=log, flush=True)
                faulthandler.dump_traceback(log, all_threads=True)

        run_briefly(write)
        dump_flight_recorder(self._rank)

    def _end(self, why: str, *, kind: FailureKind = "stuck", error_code: str = "rank.stuck") -> NoReturn:
        self._show(why)
        report = ExitReport(
            kind=kind, code=RankError.exit_code, where=place_of(self._rank, self._stages, self._host), problem=why,
            hint=f"see the stacks of its threads in {log_path(self._log_dir, self._rank)}", error_code=error_code,
        )  # fmt: skip
        run_briefly(partial(report_exit, report))
        run_briefly(logging.shutdown)
        os._exit(RankError.exit_code)


def _doing(thread: int) -> tuple[str, bool]:
    """Return which Python function a thread executes, and whether it waits there for another rank."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.endswith(_CALLS_OPERATORS):
        frame = frame.f_back
    if frame is None:
        return "", False
    name, path = frame.f_code.co_name, Path(frame.f_code.co_filename)
    is_in_collective = "/".join(path.parts[-3:]).startswith(_COLLECTIVES)
    is_waiting = is_in_collective or "wait" in name or name == "synchronize"  # with a GPU
    return f"{name} ({'/'.join(path.parts[-2:])}:{frame.f_lineno})", is_waiting


def log_to_file(log_dir: Path, rank: int) -> None:
    """Also write this rank's log, and the steps that it prints, to its log file."""
    hint = "choose a --log-dir that this user can write on every node"
    with system_errors(log_dir, "cannot be written", hint, code="output.unwritable", names_file=True):
        log_dir.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(log_path(log_dir, rank), encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logged = logging.getLogger("runner.progress")
    logged.setLevel(logging.DEBUG)
    logged.propagate = False  # the terminal shows it already
    logged.addHandler(handler)


class _LogFile(logging.FileHandler):
    """A log whose disk may fill up: that must not end a run, so what does not fit is dropped."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def enable_flight_recorder(log_dir: Path, environment: MutableMapping[str, str]) -> None:
    """Make torch record this rank's collectives; call it before the first. Variables already set are unchanged."""
    folder = log_dir.resolve() / "flight-recorder"
    for names, value in ((_SIZE, str(_NUM_ENTRIES)), (_ON_TIMEOUT, "1"), (_FILE, str(folder / "rank_"))):
        if not any(name in environment for name in names):
            environment[names[0]] = value
    if environment.get(_FILE[0]) == str(folder / "rank_"):
        with contextlib.suppress(OSError):  # whatever must be written there reports the error
            folder.mkdir(parents=True, exist_ok=True)


def dump_flight_recorder(rank: int) -> None:
    """Dump this rank's flight recorder to the file that torch's tools read; the rank may hang in any lock."""
    run_briefly(partial(_write, rank))


def run_briefly(act: Callable[[], None]) -> None:
    """Run something in a thread, and wait for it a few seconds at most: a lock, or the disk of a log, may hang."""
    thread = threading.Thread(target=act, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # a limit on threads is reached
        act()
        return
    thread.join(_LIMIT_S)


def _write(rank: int) -> None:
    prefix = next((os.environ[name] for name in _FILE if name in os.environ), None)
    if prefix is None:
        return
    import torch
    from torch._C import _distributed_c10d as c10d

    of_nccl = torch.cuda.is_initialized() and hasattr(c10d, "_dump_nccl_trace")  # type: ignore[no-untyped-call]
    dump = c10d._dump_nccl_trace if of_nccl else c10d._dump_fr_trace  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        Path(f"{prefix}{rank}").write_bytes(dump())
