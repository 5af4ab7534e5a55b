"""Show what a run is waiting for until its first step. No torch."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from runner.rundir.heartbeat import read_beats

__all__ = ["awaited", "saying_what_is_awaited"]

_EVERY_S = 10.0
_POLL_S = 1.0


@contextlib.contextmanager
def saying_what_is_awaited(log_dir: Path, num_ranks: int) -> Iterator[None]:
    """Print every ten seconds what the ranks are waiting for, until the first step or the end of the block."""
    ended, begun = threading.Event(), time.time()
    position = _size(log_dir / "metrics.jsonl")

    def watch() -> None:
        said_s = time.monotonic()
        while not ended.wait(_POLL_S):
            what = awaited(log_dir, num_ranks, since=begun, position=position)
            if what is None:
                return
            if time.monotonic() - said_s >= _EVERY_S:
                said_s = time.monotonic()
                print(f"{time.time() - begun:.0f} s: waiting for {what}", file=sys.stderr, flush=True)

    watcher = threading.Thread(target=watch, name="waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()


def awaited(log_dir: Path, num_ranks: int, *, since: float, position: int) -> str | None:
    """Return what a run that started at `since` waits for; None once metrics have a step after `position`."""
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
    num_ready = len(read_beats(log_dir, since=since))
    if num_ready < num_ranks:
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
