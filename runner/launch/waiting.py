"""Show what a run is waiting for until its first step. No torch."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from runner.rundir.heartbeat import read_beats

_EVERY_S = 10.0
_POLL_S = 1.0


@contextlib.contextmanager
def saying_what_is_awaited(log_dir: Path, num_ranks: int, begun: float) -> Iterator[None]:
    """Print what the ranks are waiting for, every ten seconds since `begun` until the first step or the block's end."""
    ended = threading.Event()
    position = _size(log_dir / "metrics.jsonl")

    def watch() -> None:
        said = begun
        while not ended.wait(_POLL_S):
            what = awaited(log_dir, num_ranks, since=begun, position=position)
            if what is None:
                return
            now = time.time()
            if now - said >= _EVERY_S:
                said = now
                print(f"{now - begun:.0f} s: waiting for {what}", file=sys.stderr, flush=True)

    watcher = threading.Thread(target=watch, name="waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()


def awaited(log_dir: Path, num_ranks: int, *, since: float, position: int) -> str | None:
    """Return what a run that started at `since` waits for.

    None once metrics have a step after `position`, or if no step follows.
    """
    try:
        with open(log_dir / "metrics.jsonl", "rb") as metrics:
            metrics.seek(position)
            if b'"loss"' in metrics.read():
                return None
    except FileNotFoundError:
        pass
    except OSError:  # unknown
        return None
    num_logging = sum(_is_since(path, since) for path in log_dir.glob("rank-*.log"))
    if num_logging < num_ranks:
        return f"{num_ranks - num_logging} of {num_ranks} ranks to import torch"
    beats = read_beats(log_dir, since=since)
    if any(beat.phase == "end" for beat in beats):  # no step was left to run
        return None
    if (num_ready := len(beats)) < num_ranks:
        return f"{num_ranks - num_ready} of {num_ranks} ranks to meet and load their stages"
    return "the first step to end"


def _is_since(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime >= since - 1  # file systems may cut off what is below a second
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
