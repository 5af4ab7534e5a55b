"""Heartbeats: a file per rank in the log folder with its step and what it executes. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from manifests.store import write_file

ALIVE_S = 2.0  # a rank writes its heartbeat at least this often, however long its step takes
SKEWED_S = 30.0  # the clocks of nodes may differ by this much
_FOLDER = "heartbeat"
_MOST_S = 1e12  # since the epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One heartbeat. `time` is in seconds since the epoch, `doing` the function being executed and its line."""

    rank: int
    stages: tuple[int, ...]
    host: str
    pid: int
    step: int
    phase: str
    time: float
    doing: str = ""
    is_waiting: bool = False  # for another rank, judging by its stack


def log_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank-{rank:05d}.log"


def heartbeat_path(log_dir: Path, rank: int) -> Path:
    return log_dir / _FOLDER / f"rank-{rank:05d}.json"


def write_beat(path: Path, beat: Beat) -> None:
    """Write a heartbeat atomically: a reader sees this one or the previous one."""
    write_file(path, (json.dumps(asdict(beat)) + "\n").encode(), is_durable=False)


def read_beats(log_dir: Path, *, since: float = 0.0) -> tuple[Beat, ...]:
    """Return every rank's last heartbeat that is not older than `since`, ordered by rank."""
    beats = []
    for path in sorted((log_dir / _FOLDER).glob("rank-*.json")):
        try:
            beat = json.loads(path.read_bytes())
            beat = Beat(**{**beat, "stages": tuple(beat["stages"])})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
        if _is_whole(beat) and beat.time >= since:
            beats.append(beat)
    return tuple(beats)


def _is_whole(beat: Beat) -> bool:
    """Whether every field that was read has its declared type."""
    counts = (beat.rank, beat.pid, beat.step, *beat.stages)
    texts = (beat.host, beat.phase, beat.doing)
    return (
        all(type(count) is int for count in counts)
        and all(isinstance(text, str) for text in texts)
        and isinstance(beat.time, int | float)
        and abs(beat.time) < _MOST_S
    )


def clear_beats(log_dir: Path) -> None:
    for path in (log_dir / _FOLDER).glob("rank-*.json"):
        path.unlink(missing_ok=True)
