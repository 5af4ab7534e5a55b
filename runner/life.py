"""A rank's life: signals that ask it to stop, its heartbeat file, and a watchdog for steps that do not end.

# Note [Stopping]
SIGUSR2 and SIGTERM ask a run that saves checkpoints to stop. Ranks get them at different times, and torchrun
passes them on again: a signal only raises a flag, which goes with the totals of every step, so that all
ranks stop after the same one. torchrun also sends SIGTERM to the ranks that are left when one is gone;
then no step ends, and the watchdog soon ends the rank. Python runs no signal handler while a collective
waits, so a thread of its own listens.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from manifests.errors import RankError, UserError

__all__ = ["GRACE_S", "Life", "StoppedError", "heartbeat_path", "log_to_file"]

logger = logging.getLogger("runner")
GRACE_S = 15.0  # after SIGTERM, a step or a save must end within this, or the rank ends
_POLL_S = 0.5
_BEAT_S = 1.0  # the heartbeat file is written no more often


def log_to_file(log_dir: Path, rank: int) -> None:
    """Write what this rank logs to a file of its own, too."""
    log_dir.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log_dir / f"rank-{rank:05d}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)


class StoppedError(UserError):
    """The run ended at a signal, with a checkpoint."""

    exit_code = 130


def heartbeat_path(log_dir: Path, rank: int) -> Path:
    return log_dir / "heartbeat" / f"rank-{rank:05d}.json"


class Life:
    """Watches over one rank while the context is entered.

    The heartbeat file says `step`, `phase`, `time` (seconds since the epoch), `host` and `pid`. With
    `can_stop`, signals raise `is_asked_to_stop` instead of ending the process.
    """

    def __init__(self, log_dir: Path, rank: int, *, where: str, step_timeout_s: float, can_stop: bool) -> None:
        self._path, self._where = heartbeat_path(log_dir, rank), where
        self._step_timeout_s, self._can_stop = step_timeout_s, can_stop
        self.is_asked_to_stop = False
        self._terminated_s: float | None = None
        self._phase, self._last_s, self._written_s = "begin", time.monotonic(), 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Life:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        if self._can_stop:
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGUSR2):
                signal.signal(number, lambda *_: None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._can_stop:
            signal.set_wakeup_fd(-1)
        self._receiver.close()
        self._sender.close()

    def beat(self, step: int, phase: str = "train") -> None:
        """Tell that a step has ended, or that another phase begins; only steps of `train` are timed."""
        self._phase, self._last_s = phase, time.monotonic()
        if self._last_s - self._written_s < _BEAT_S and phase == "train":
            return
        self._written_s = self._last_s
        beat = {"step": step, "phase": phase, "time": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk is met, and said, by what must be written
            partial.write_text(json.dumps(beat) + "\n")
            partial.replace(self._path)

    def _watch(self) -> None:
        while not self._ended.is_set():
            if select.select([self._receiver], [], [], _POLL_S)[0]:
                self._note(self._receiver.recv(64))
            if self._phase != "train":
                continue
            now_s = time.monotonic()
            if self._terminated_s is not None and now_s - max(self._terminated_s, self._last_s) > GRACE_S:
                self._end(f"was told to end, and no step has ended for {GRACE_S:.0f} s: another rank is gone")
            if now_s - self._last_s > self._step_timeout_s:
                self._end(f"no step has ended for {self._step_timeout_s:.0f} s")

    def _note(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGUSR2 in numbers:
            self.is_asked_to_stop = True
        if signal.SIGTERM in numbers and self._terminated_s is None:
            self._terminated_s = time.monotonic()

    def _end(self, why: str) -> NoReturn:
        logger.error("error: %s: %s; what each thread was doing:", self._where, why)
        faulthandler.dump_traceback(all_threads=True)
        logging.shutdown()
        os._exit(RankError.exit_code)
