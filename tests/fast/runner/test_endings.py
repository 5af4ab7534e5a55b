"""What the agent says of ranks that have ended: of all that failed at once, the one that the others followed."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from manifests.errors import InputError, UnreachableError, unreadable
from runner.life.ending import AGENT, Ending, code_of, read_ending, tell
from runner.life.heartbeat import Beat, clear_beats, heartbeat_path, log_path, read_beats, write_beat
from runner.life.inquest import find_cause
from runner.life.machine import exhausted, unreachable

LOST = Ending(kind="lost", code=5, where="rank 1, stage 1, node n", problem="another rank is gone or too slow: closed")
OWN = Ending(kind="failed", code=3, where="rank 2, stage 2, node n: shard", problem="is damaged")
NOW = 1_000_000


def failure(folder: Path, code: int, ending: Ending | None = None, time_s: int = NOW) -> ProcessFailure:
    """Give what torchrun knows of a rank that has ended, with the file that the rank left."""
    path = folder / f"error-{len(list(folder.iterdir()))}.json"
    if ending is not None:
        text = {"message": "x", "extraInfo": {"timestamp": str(time_s)}}
        path.write_text(json.dumps({"message": text, "runner": asdict(ending)}))
    found = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(path))
    found.timestamp = time_s
    return found


def beat(rank: int, *, is_waiting: bool = True, silent_s: float = 0.0) -> Beat:
    return Beat(rank=rank, stages=(rank,), host="n", pid=1, step=7, phase="train", time=NOW - silent_s,
                doing="wait (a.py:1)" if is_waiting else "read (b.py:2)", is_waiting=is_waiting)  # fmt: skip


def said(failures: dict[int, ProcessFailure], beats: tuple[Beat, ...] = ()) -> str | None:
    cause = find_cause(failures, beats, lambda rank: f"rank {rank}, node n")
    return None if cause is None else f"{cause.code} {cause.where}: {cause.problem}"


def test_killed_rank_comes_before_peers_that_noticed_it_first(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 5, LOST), 2: failure(tmp_path, -9), 3: failure(tmp_path, -15)}
    assert said(failures) == "5 rank 2, node n: ended by SIGKILL; all ranks were stopped"


def test_rank_that_torchrun_had_to_kill_in_the_end_is_not_blamed_for_that(tmp_path: Path) -> None:
    failures = {1: failure(tmp_path, 5, LOST), 2: failure(tmp_path, -9, time_s=NOW + 30)}
    beats = (beat(0), beat(1), beat(2, silent_s=9), beat(3))
    assert said(failures, beats) == (
        "5 rank 2, stage 2, node n: gave no sign of life for 9 s, and the other ranks waited for it in vain after "
        "step 7: it was in wait (a.py:1) then"
    )


def test_what_a_rank_met_itself_comes_before_what_its_peers_lost(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 5, LOST, NOW - 1), 2: failure(tmp_path, 3, OWN), 3: failure(tmp_path, -15)}
    assert said(failures) == "3 rank 2, stage 2, node n: shard: is damaged"


def test_the_one_rank_that_does_not_wait_is_the_one_that_is_waited_for(tmp_path: Path) -> None:
    failures = {1: failure(tmp_path, 5, LOST), 3: failure(tmp_path, 5, LOST)}
    assert said(failures, (beat(0), beat(1), beat(2, is_waiting=False), beat(3))) == (
        "5 rank 2, stage 2, node n: the other ranks waited for it in vain after step 7: it was in read (b.py:2)"
    )


@pytest.mark.parametrize("is_waiting", [True, False], ids=["all-wait", "none-waits"])
def test_where_heartbeats_tell_nothing_the_first_rank_says_what_it_saw(tmp_path: Path, is_waiting: bool) -> None:
    stuck = replace(LOST, kind="stuck", problem="no step has ended for 8 s")
    failures = {1: failure(tmp_path, 5, stuck), 0: failure(tmp_path, 5, stuck, NOW + 1)}
    beats = (beat(0, is_waiting=is_waiting), beat(1, is_waiting=is_waiting))
    assert said(failures, beats) == "5 rank 1, stage 1, node n: no step has ended for 8 s"


def test_ranks_that_stopped_as_they_were_asked_have_no_cause(tmp_path: Path) -> None:
    assert said({0: failure(tmp_path, 130), 1: failure(tmp_path, -15, time_s=NOW + 1)}) is None


def test_rank_that_ended_without_a_word_is_named_with_its_code(tmp_path: Path) -> None:
    assert said({1: failure(tmp_path, 7)}) == (
        "5 rank 1, node n: ended with code 7 without a word; all ranks were stopped"
    )
    assert said({1: failure(tmp_path, -6)}) == "5 rank 1, node n: ended by SIGABRT; all ranks were stopped"


def test_ending_is_left_to_the_agent_that_reads_it_and_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv(AGENT, str(os.getpid()))  # not this process's parent
    tell(OWN, aloud=False)
    assert not path.exists()
    monkeypatch.setenv(AGENT, str(os.getppid()))
    tell(OWN, aloud=False)
    assert read_ending(json.loads(path.read_text())) == OWN
    assert read_ending({"message": "of torchrun's own"}) is None


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                      "tried to allocate 1048576 bytes. Error code 12 (Cannot allocate memory)"), "1.0 MiB more"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "2.50 GiB more"),
        (MemoryError(), "a block"),
        (OSError(12, "Cannot allocate memory"), "a block"),
        (RuntimeError("std::bad_alloc"), "a block"),
    ],
    ids=["cpu", "cuda", "python", "kernel", "c++"],
)  # fmt: skip
def test_too_little_memory_is_a_sentence_whoever_says_it(error: Exception, wanted: str) -> None:
    wrapped = RuntimeError("[Stage 2] failed to run forward")
    wrapped.__cause__ = error
    for found in (exhausted(error), exhausted(wrapped)):
        assert found is not None
        assert found.exit_code == 5
        assert found.problem.startswith(f"out of memory: {wanted} could not be had, its process has had up to ")


def test_other_errors_are_not_about_memory() -> None:
    assert exhausted(RuntimeError("shapes differ")) is None
    assert exhausted(InputError("shard", "is damaged")) is None


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EIO, 5), (errno.ESTALE, 5), (errno.ENOTCONN, 5), (errno.ENOENT, 3), (errno.EACCES, 3), (errno.EISDIR, 3)],
)
def test_disk_that_fails_ends_a_job_as_a_lost_rank_does_and_a_file_that_is_not_there_as_bad_input(
    number: int, code: int
) -> None:
    met = OSError(number, os.strerror(number), "shard")
    said = unreadable("shard", met)
    assert (said.where, said.problem) == ("shard", f"cannot be read: {os.strerror(number)}")
    assert (code_of(said), said.exit_code) == (code, 3)  # 3: reshard, too, reads files, and has no ranks
    assert code_of(said.within("rank 2")) == code
    assert isinstance(said, UnreachableError) == (code == 5)
    found = unreachable(met)
    assert (str(found) if found else None) == (str(said) if code == 5 else None)


def test_heartbeats_are_read_back_by_rank_and_old_ones_are_not(tmp_path: Path) -> None:
    heartbeat_path(tmp_path, 0).parent.mkdir()
    beats = (replace(beat(0), time=time.time()), beat(2))
    for each in beats:
        write_beat(heartbeat_path(tmp_path, each.rank), each)
    heartbeat_path(tmp_path, 1).write_text("{")
    assert read_beats(tmp_path) == beats
    assert read_beats(tmp_path, since=NOW + 1) == beats[:1]
    assert log_path(tmp_path, 2).name == "rank-00002.log"
    clear_beats(tmp_path)
    assert read_beats(tmp_path) == ()
