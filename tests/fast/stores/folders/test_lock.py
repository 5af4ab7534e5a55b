"""When a lock of another machine is taken over, by a clock of the test's: nodes' clocks may differ."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stores.folders import lock
from stores.folders.lock import locking
from tests.refusals import refusal


@dataclass
class Clock:
    """Time passes in `sleep` alone; `on_tick` is what happens on the other machine meanwhile."""

    now_s: float = 0.0
    on_tick: list[Callable[[float], None]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for act in self.on_tick:
            act(self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(lock, "_SETTLE_S", 0.0)  # of shared file systems
    return clock


def put_lock(folder: Path, age_s: float) -> tuple[Path, float]:
    """Leave a lock of a process on another machine, last touched so long ago by this one's clock; return that time."""
    path, touched_s = folder / "lock", time.time() - age_s
    owner = {"host": "elsewhere", "pid": 7, "birth": "another-boot 17", "namespace": "pid:[1]", "nonce": "0"}
    path.write_text(json.dumps({**owner, "doing": "trains"}))
    os.utime(path, (touched_s, touched_s))
    return path, touched_s


def take(path: Path) -> None:
    with locking(path, "place", "took over"):
        pass


@pytest.mark.parametrize("age_s", [1000, -1000])
def test_lock_that_is_touched_is_kept_however_the_clocks_differ(age_s: float, tmp_path: Path, clock: Clock) -> None:
    path, touched_s = put_lock(tmp_path, age_s)
    clock.on_tick.append(lambda now_s: os.utime(path, 2 * (touched_s + now_s // 5 * 5,)))
    error = refusal(lambda: take(path))
    assert (error.code, path.exists()) == ("launch.folder-in-use", True)


def test_lock_that_is_touched_is_kept_where_a_mount_caches_times_for_minutes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS with actimeo=600: what a file's `stat` says is as old as the last time that it was opened."""
    path, touched_s = put_lock(tmp_path, 0)
    open_file, stat, cached = os.open, os.stat, {path: os.stat(path)}

    def reopen(file: str | Path, *arguments: int) -> int:
        descriptor = open_file(file, *arguments)
        if file == path:
            cached[path] = os.fstat(descriptor)
        return descriptor

    monkeypatch.setattr(os, "open", reopen)
    monkeypatch.setattr(os, "stat", lambda file, **flags: cached[file] if file == path else stat(file, **flags))
    clock.on_tick.append(lambda now_s: os.utime(path, 2 * (touched_s + now_s // 5 * 5,)))
    error = refusal(lambda: take(path))
    assert (error.code, os.listdir(tmp_path)) == ("launch.folder-in-use", [path.name])


@pytest.mark.parametrize(("age_s", "watched_s"), [(1000, 16), (-1000, 61)])
def test_lock_of_a_dead_process_is_taken_over_however_the_clocks_differ(
    age_s: float, watched_s: float, tmp_path: Path, clock: Clock
) -> None:
    path, _ = put_lock(tmp_path, age_s)
    take(path)
    assert (clock.now_s, path.exists()) == (watched_s, False)


def test_lock_that_is_released_while_it_is_watched_is_taken_at_once(tmp_path: Path, clock: Clock) -> None:
    path, _ = put_lock(tmp_path, 0)
    clock.on_tick.append(lambda now_s: path.unlink() if now_s == 2 else None)
    take(path)
    assert (clock.now_s, path.exists()) == (2, False)


@pytest.mark.parametrize("may_be_removed", [False, True])
def test_lock_that_was_taken_over_is_noticed_and_one_that_was_removed_if_that_matters(
    may_be_removed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "lock"
    with locking(path, "place", "trains", may_be_removed=may_be_removed) as check:
        check()
        path.unlink()
        if may_be_removed:
            check()
        else:
            assert refusal(check).code == "launch.folder-in-use"
        put_lock(tmp_path, 0)
        assert refusal(check).code == "launch.folder-in-use"
    assert path.exists()
