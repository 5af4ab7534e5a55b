"""Exit reports, and which of several failed ranks the agent reports as the cause."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from manifests.errors import InputError, UnreachableError, refused_by_system
from runner.checkpoint import shard_file
from runner.distributed import watchdog
from runner.distributed.fail_together import (
    ExhaustedError,
    OneRankError,
    errors_of_rank,
    exhausted,
    join_failures,
    unforeseen,
    unreachable,
)
from runner.distributed.watchdog import Watchdog, log_to_file
from runner.launch.agent.diagnose import find_cause, find_cause_at_stop
from runner.rundir.exit_report import (
    AGENT,
    REPORTS,
    ExitReport,
    code_of,
    note_stopping,
    read_report,
    read_reports,
    report_exit,
)
from runner.rundir.records import Beat, clear_beats, heartbeat_path, log_path, read_beats, write_beat
from runner.tensors.local_shard import whole_pieces
from runner.training.gradient_norm import StepTotals
from stores.folders.publish import publishing
from tests.fast.runner.tiny import write_shard

LOST = ExitReport(kind="lost", code=5, where="rank 1, stage 1, node n", problem="closed", error_code="rank.lost")
OWN = ExitReport(
    kind="failed", code=3, where="rank 2, stage 2, node n: shard", problem="is damaged", error_code="shard.damaged"
)
NOW = 1_000_000
DEBUGGING = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"  # which torch adds to all of them
CUBLAS = "CUDA error: CUBLAS_STATUS_{} when calling `cublasGemmEx(handle)`"
STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


def failure(folder: Path, code: int, ending: ExitReport | None = None, time_s: int = NOW) -> ProcessFailure:
    """Return what torchrun knows of a rank that has exited, with its error file."""
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


def cause_of(failures: dict[int, ProcessFailure], beats: tuple[Beat, ...] = ()) -> tuple[int, str, str] | None:
    """Return the cause's exit code, place and error code."""
    cause = find_cause(failures, beats, lambda rank: f"rank {rank}, node n")
    return None if cause is None else (cause.code, cause.where, cause.error_code)


def test_cause_is_reported_as_its_rank_reported_it(tmp_path: Path) -> None:
    followed = replace(OWN, is_elsewhere=True)
    failures = {0: failure(tmp_path, 5, followed, NOW - 1), 2: failure(tmp_path, 3, OWN)}
    assert find_cause(failures, (), str) == OWN
    assert find_cause({0: failures[0]}, (), str) == followed  # another node's agent may have exited


def test_killed_rank_comes_before_peers_that_noticed_it_first(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 5, LOST), 2: failure(tmp_path, -9), 3: failure(tmp_path, -15)}
    assert cause_of(failures) == (5, "rank 2, node n", "rank.killed")


def test_rank_that_aborted_alone_is_the_cause_unless_another_failed_or_is_waited_for(tmp_path: Path) -> None:
    failures = {1: failure(tmp_path, 5, LOST), 2: failure(tmp_path, -6)}
    aborted = (5, "rank 2, node n", "rank.killed")
    busy = (beat(0), beat(1), beat(2, is_waiting=False))
    assert cause_of({2: failures[2], 1: failure(tmp_path, -15)}, busy) == aborted
    assert cause_of(failures, (beat(0), beat(1), beat(2))) == aborted
    assert cause_of(failures) == aborted
    stuck = (*map(beat, range(3)), beat(3, is_waiting=False))
    assert cause_of(failures, stuck) == (5, "rank 3, stage 3, node n", "rank.stuck")


@pytest.mark.parametrize("beats", [(), (beat(0, is_waiting=False), beat(1), beat(2))], ids=["none", "busy"])
def test_rank_that_nccl_aborted_is_no_cause(tmp_path: Path, beats: tuple[Beat, ...]) -> None:
    """Its host waits for the device, as far as a heartbeat shows it, or it has sent none yet."""
    own, nccl = failure(tmp_path, 3, OWN), failure(tmp_path, -6)
    assert cause_of({0: nccl, 2: own}, beats) == (3, "rank 2, stage 2, node n: shard", "shard.damaged")
    ended = {0: nccl, 1: nccl, 2: failure(tmp_path, 5, replace(LOST, kind="stuck", error_code="rank.stuck"))}
    found = cause_of(ended, beats)
    assert found is not None
    assert found[2] == "rank.stuck"


def test_ranks_that_nccl_aborted_have_waited_for_another_one(tmp_path: Path) -> None:
    """Their hosts may be anywhere, such as in the launch of a kernel, for which a full queue has no room."""
    failures = {0: failure(tmp_path, -15), 1: failure(tmp_path, -6), 2: failure(tmp_path, -6)}
    busy = [beat(rank, is_waiting=False) for rank in range(3)]
    assert cause_of(failures, tuple(busy)) == (5, "rank 0, stage 0, node n", "rank.stuck")
    for beats in ((), tuple(busy[1:]), tuple(map(beat, range(3)))):
        assert cause_of(failures, beats) == (5, "rank 1, node n", "rank.lost")


@pytest.mark.parametrize(
    ("other", "is_waiting", "expected"),
    [(-15, True, ("lost", "rank.killed")), (-15, False, ("failed", "rank.killed")), (-6, False, ("lost", "rank.lost"))],
)
def test_agent_whose_ranks_aborted_while_they_waited_lets_that_of_another_node_report(
    tmp_path: Path, other: int, is_waiting: bool, expected: tuple[str, str]
) -> None:
    failures = {1: failure(tmp_path, -6), 2: failure(tmp_path, other)}
    cause = find_cause(failures, (beat(0), beat(1, is_waiting=is_waiting), beat(2)), str)
    assert cause is not None
    assert (cause.kind, cause.error_code) == expected


def test_rank_that_ended_with_a_code_of_no_rank_and_no_report_is_the_cause(tmp_path: Path) -> None:
    """glibc exits with 127 where a thread gets no memory."""
    failures = {0: failure(tmp_path, -15), 1: failure(tmp_path, 127), 2: failure(tmp_path, 5, LOST)}
    beats = (beat(0, is_waiting=False), beat(1), beat(2))
    assert cause_of(failures, beats) == (5, "rank 1, node n", "rank.ended")


def test_rank_that_torchrun_had_to_kill_in_the_end_is_not_blamed_for_that(tmp_path: Path) -> None:
    failures = {1: failure(tmp_path, 5, LOST), 2: failure(tmp_path, -9, time_s=NOW + 30)}
    beats = (beat(0), beat(1), beat(2, silent_s=9), beat(3))
    assert cause_of(failures, beats) == (5, "rank 2, stage 2, node n", "rank.silent")


def test_error_of_a_rank_comes_before_lost_connections_of_others(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 5, LOST, NOW - 1), 2: failure(tmp_path, 3, OWN), 3: failure(tmp_path, -15)}
    assert cause_of(failures) == (3, "rank 2, stage 2, node n: shard", "shard.damaged")


def test_the_one_rank_that_does_not_wait_is_the_one_that_is_waited_for(tmp_path: Path) -> None:
    failures = {1: failure(tmp_path, 5, LOST), 3: failure(tmp_path, 5, LOST)}
    beats = (beat(0), beat(1), beat(2, is_waiting=False), beat(3))
    assert cause_of(failures, beats) == (5, "rank 2, stage 2, node n", "rank.stuck")


@pytest.mark.parametrize("skew_s", [-25.0, 25.0], ids=["behind", "ahead"])
def test_rank_is_silent_by_the_clock_of_its_node_which_may_differ_from_ours(tmp_path: Path, skew_s: float) -> None:
    failures = {0: failure(tmp_path, 5, LOST)}
    there = [replace(one, host="m", time=one.time + skew_s) for one in (beat(2), beat(3))]
    assert cause_of(failures, (beat(0), beat(1), *there)) == (5, "rank 1, stage 1, node n", "rank.lost")
    there[1] = replace(there[1], time=there[1].time - 9)
    assert cause_of(failures, (beat(0), beat(1), *there)) == (5, "rank 3, stage 3, node m", "rank.silent")


def test_node_that_is_silent_as_a_whole_is_so_by_our_clock(tmp_path: Path) -> None:
    gone = replace(beat(2, silent_s=60), host="m")
    found = cause_of({0: failure(tmp_path, 5, LOST)}, (beat(0), beat(1), gone))
    assert found == (5, "rank 2, stage 2, node m", "rank.silent")


@pytest.mark.parametrize("is_waiting", [True, False], ids=["all-wait", "none-waits"])
def test_without_a_suspect_among_heartbeats_the_first_report_is_the_cause(tmp_path: Path, is_waiting: bool) -> None:
    stuck = replace(LOST, kind="stuck", error_code="rank.stuck")
    failures = {1: failure(tmp_path, 5, stuck), 0: failure(tmp_path, 5, stuck, NOW + 1)}
    beats = (beat(0, is_waiting=is_waiting), beat(1, is_waiting=is_waiting))
    assert cause_of(failures, beats) == (5, "rank 1, stage 1, node n", "rank.stuck")


def test_ranks_that_stopped_as_requested_have_no_cause(tmp_path: Path) -> None:
    assert cause_of({0: failure(tmp_path, 130), 1: failure(tmp_path, -15, time_s=NOW + 1)}) is None


def test_errors_at_a_stop_are_the_cause_and_lost_ranks_only_if_a_checkpoint_was_due() -> None:
    followed = replace(OWN, is_elsewhere=True)
    assert find_cause_at_stop((LOST, followed, OWN), is_unsaved=False) == OWN
    assert find_cause_at_stop((LOST, followed), is_unsaved=False) == followed
    assert find_cause_at_stop((LOST,), is_unsaved=True) == LOST
    assert find_cause_at_stop((LOST,), is_unsaved=False) is None
    assert find_cause_at_stop((), is_unsaved=True) is None


@pytest.mark.parametrize(("exit_code", "code"), [(7, "rank.ended"), (-6, "rank.killed")])
def test_rank_that_exited_without_a_report_is_named(exit_code: int, code: str, tmp_path: Path) -> None:
    assert cause_of({1: failure(tmp_path, exit_code)}) == (5, "rank 1, node n", code)


def test_report_is_left_to_the_agent_that_reads_it_and_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv(AGENT, str(os.getpid()))  # not this process's parent
    report_exit(OWN, echo=False)
    assert not path.exists()
    monkeypatch.setenv(AGENT, str(os.getppid()))
    report_exit(OWN, echo=False)
    assert read_report(json.loads(path.read_text())) == OWN
    folder = tmp_path / "reports"  # which torchrun does not remove after a signal
    folder.mkdir()
    monkeypatch.setenv(REPORTS, str(folder))
    followed = replace(OWN, is_elsewhere=True)
    report_exit(followed, echo=False)
    (folder / "half.json").write_text("{")
    assert read_report(json.loads(path.read_text())) == followed
    assert read_reports(folder) == (followed,)
    assert read_report({"message": "of torchrun's own"}) is None


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                      "tried to allocate 1048576 bytes. Error code 12 (Cannot allocate memory)"), "1.0 MiB;"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "2.50 GiB;"),
        (MemoryError(), ""),
        (OSError(12, "Cannot allocate memory"), ""),
        (RuntimeError("std::bad_alloc"), ""),
        (RuntimeError(CUBLAS.format("ALLOC_FAILED")), ""),
    ],
    ids=["cpu", "cuda", "python", "kernel", "c++", "cublas"],
)  # fmt: skip
def test_out_of_memory_is_recognized_whatever_raises_it(error: Exception, wanted: str) -> None:
    wrapped = RuntimeError("[Stage 2] failed to run forward")
    wrapped.__cause__ = error
    for found in (exhausted(error), exhausted(wrapped)):
        assert found is not None
        assert (found.code, found.exit_code) == ("system.out-of-memory", 5)
        assert f" {wanted}" in found.problem


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.AcceleratorError(f"CUDA error: uncorrectable ECC error encountered\n{DEBUGGING}"), 5),
        (torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered\n{DEBUGGING}"), 5),
        (torch.AcceleratorError("HIP error: unspecified launch failure"), 5),
        (RuntimeError(CUBLAS.format("EXECUTION_FAILED")), 5),
        (torch.AcceleratorError(f"CUDA error: device-side assert triggered\n{DEBUGGING}"), 1),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"), 1),
        *((RuntimeError(CUBLAS.format(status)), 1) for status in ("NOT_SUPPORTED", "INVALID_VALUE", "ARCH_MISMATCH")),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 1),
        (AssertionError(), 1),
    ],
    ids=["ecc", "memory access", "hip", "cublas", "assert", "image", "unsupported", "value", "arch", "torch", "ours"],
)  # fmt: skip
def test_gpu_that_fails_is_no_bug_and_a_kernel_that_refuses_its_input_is(error: Exception, code: int) -> None:
    wrapped = RuntimeError("[Stage 2] failed to run forward")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        reported = unforeseen(each, "rank 2", "Traceback")
        expected = "rank.gpu-failed" if code == 5 else "rank.internal-error"
        assert (reported.code, code_of(reported), reported.where) == (expected, code, "rank 2")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((number, 5) for number in (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EINTR, errno.EKEYEXPIRED)),
        *((number, 5) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)),
        *((number, 3) for number in (errno.ENOENT, errno.EACCES, errno.EISDIR)),
    ],
)
def test_disk_that_fails_ends_a_job_as_a_lost_rank_does_and_a_file_that_is_not_there_as_bad_input(
    number: int, code: int
) -> None:
    met = OSError(number, os.strerror(number), "shard")
    said = refused_by_system("shard", met, code="system.io")
    assert (said.where, said.code) == ("shard", "system.io")
    assert (code_of(said), said.exit_code) == (code, 3)  # 3: reshard reads files, too, and has no ranks
    assert code_of(said.within("rank 2")) == code
    assert isinstance(said, UnreachableError) == (code == 5)
    found = unreachable(met)
    assert ((found.where, found.hint) if found else None) == (("shard", said.hint) if code == 5 else None)


def test_thread_that_cannot_be_started_ends_a_job_as_a_lost_rank_does() -> None:
    found = unreachable(RuntimeError("can't start new thread"))
    assert found is not None
    assert (found.code, code_of(found)) == ("system.refused", 5)
    assert unreachable(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_disk_that_does_not_take_a_shard_ends_a_job_as_a_lost_rank_does_unless_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError) as shard:
        write_shard(whole_pieces({"w": torch.zeros(2)}), tmp_path, "shard")
    with (
        pytest.raises(InputError) as folder,
        publishing(tmp_path / "out", force=False, find_owned=lambda _: None),
    ):
        fsync(0)
    assert shard.value.where == str(tmp_path / "shard")
    code = "output.disk-full" if number in (errno.ENOSPC, errno.EDQUOT) else "output.unwritable"
    assert {shard.value.code, folder.value.code} == {code}
    assert {code_of(shard.value), code_of(folder.value)} == {5 if number in (errno.EIO, errno.ESTALE) else 3}


def test_large_tensor_is_written_in_parts_and_whoever_waits_hears_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    def is_cancelled() -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    tensors = {"a": torch.arange(1000.0), "b": torch.zeros(0), "c": torch.arange(7, dtype=torch.bfloat16)}
    whole = write_shard(whole_pieces(tensors), tmp_path, "whole", is_cancelled=is_cancelled)
    assert num_asked == 2
    monkeypatch.setattr(shard_file, "PART_NBYTES", 999)
    monkeypatch.setattr(shard_file, "_SYNC_NBYTES", 1500)
    parts = write_shard(whole_pieces(tensors), tmp_path, "parts", is_cancelled=is_cancelled)
    assert num_asked == 2 + 5 + 1
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert parts.digest == whole.digest
    read = load_file(tmp_path / "parts")
    assert all(torch.equal(read[fqn], tensors[fqn]) for fqn in tensors)


def test_error_that_a_restart_cannot_fix_comes_first_and_has_the_code() -> None:
    met = {
        "rank 0": ExhaustedError("", "out of memory", "take less", code="system.out-of-memory"),
        "rank 1": UnreachableError("disk", "cannot be read", code="system.io"),
        "rank 2": InputError("shard", "is damaged", "download it again", code="shard.digest-mismatch"),
        "rank 3": InputError("shard", "is damaged", "download it again", code="shard.digest-mismatch"),
    }
    joined = join_failures(met)
    assert code_of(joined) == 3
    assert str(joined) == (
        "rank 2: shard: is damaged [shard.digest-mismatch]\nrank 0: out of memory [system.out-of-memory]\n"
        "rank 1: disk: cannot be read [system.io]\nhint: download it again"
    )
    del met["rank 2"], met["rank 3"]
    joined = join_failures(met)
    assert code_of(joined) == 5
    assert str(joined) == (
        "rank 0: out of memory [system.out-of-memory]\nrank 1: disk: cannot be read [system.io]\nhint: take less"
    )


def test_step_after_a_save_has_the_grace_of_the_step_before_and_the_first_that_of_the_step_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watchdog = Watchdog(tmp_path, 0, [0], step_timeout_s=1200, can_stop=True)
    watchdog.beat(7)  # of a run that was resumed
    assert watchdog.grace_s == 1200
    now_s += 40
    watchdog.beat(8)
    now_s += 0.01
    watchdog.beat(8, "save")
    now_s += 3
    watchdog.beat(8)
    assert watchdog.grace_s == 80
    now_s += 2
    watchdog.beat(9)
    assert watchdog.grace_s == 15


def test_step_may_be_slow_after_a_sigterm_to_the_job_and_not_after_one_for_a_rank_that_has_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setenv(REPORTS, str(tmp_path))
    rank = Watchdog(tmp_path, 0, [0], step_timeout_s=1200, can_stop=True)
    rank.beat(7)
    now_s += 2
    rank.beat(8)
    rank._note(bytes((signal.SIGTERM,)))
    now_s += 14
    assert not rank.has_lost_a_rank
    now_s += 2
    assert rank.has_lost_a_rank
    note_stopping(tmp_path)
    assert not rank.has_lost_a_rank
    (tmp_path / "1234.json").touch()  # the report of another rank
    assert rank.has_lost_a_rank


def test_signal_is_heard_by_a_rank_with_more_than_a_thousand_connections(tmp_path: Path) -> None:
    most, handlers = resource.getrlimit(resource.RLIMIT_NOFILE), {number: signal.getsignal(number) for number in STOPS}
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most[0], 2048), most[1]))
    connections = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while connections[-1] < 1024:
            connections.append(os.dup(connections[0]))
        with Watchdog(tmp_path, 0, [0], step_timeout_s=1200, can_stop=True) as watchdog:
            signal.raise_signal(signal.SIGUSR2)
            deadline_s = time.monotonic() + 10
            while not watchdog.is_asked_to_stop and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert watchdog.is_asked_to_stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for connection in connections:
            os.close(connection)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("hanging", ["log", "heartbeat"])
def test_log_folder_whose_disk_does_not_answer_keeps_no_step_from_its_timeout(
    hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, answered, ended, codes = log_path(tmp_path, 0), threading.Event(), threading.Event(), list[int]()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()
        raise SystemExit  # which ends the thread

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: answered.wait(60))
    monkeypatch.setattr("runner.distributed.watchdog._LIMIT_S", 0.1)
    if hanging == "log":
        os.mkfifo(log)  # which nobody reads: opening it waits
    with Watchdog(tmp_path, 0, [0], step_timeout_s=2, can_stop=False) as watchdog:
        if hanging == "heartbeat":
            monkeypatch.setattr(os, "replace", lambda *_: answered.wait(60))
        watchdog.beat(1)
        is_ended = ended.wait(20)
        answered.set()
        reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    os.close(reader)
    assert (is_ended, codes) == (True, [5])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_step_that_hangs_ends_a_rank_that_gets_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = SimpleQueue[int]()

    def leave(code: int) -> None:
        codes.put(code)
        raise SystemExit  # which ends the thread

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    with Watchdog(tmp_path, 0, [0], step_timeout_s=1, can_stop=False) as watchdog:
        before = threading.stack_size(1 << 60)  # which no thread gets
        try:
            watchdog.beat(1)
            assert codes.get(timeout=20) == 5
        finally:
            threading.stack_size(before)
    assert "in _watch\n" in log_path(tmp_path, 0).read_text()


@pytest.fixture
def loggers() -> Iterator[None]:
    """Leave handlers as they were."""
    found = [(logger, list(logger.handlers)) for logger in map(logging.getLogger, ("", "runner.progress"))]
    yield
    for logger, handlers in found:
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("loggers")
def test_log_on_a_full_disk_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log_path(tmp_path, 0).symlink_to("/dev/full")
    log_to_file(tmp_path, 0)
    for _ in range(9):
        logging.getLogger("runner.progress").debug("step 1/3 %s", "x" * 4096)
    with contextlib.suppress(OSError):  # which logging.shutdown catches
        logging.getLogger("runner.progress").handlers[-1].close()
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("loggers")
def test_log_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError) as refused:
        log_to_file(tmp_path / "file" / "log", 0)
    assert (refused.value.where, refused.value.code) == (f"{tmp_path}/file/log", "output.unwritable")


def test_rank_that_waits_for_numbers_of_others_on_a_gpu_is_known_to_wait(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL, receives and collectives are only enqueued: the host waits where it reads what comes of them."""
    totals, numbers = StepTotals([], (), device=torch.device("cpu")), SimpleQueue[list[list[float]]]()
    monkeypatch.setattr(torch.Tensor, "tolist", numbers.get)  # no function of Python, as torch's is none
    monkeypatch.setattr(torch._C, "_cuda_synchronize", numbers.get, raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.ops._c10d_functional.wait_tensor, "_op", numbers.get)  # as DTensor does, with gloo
    waits = (partial(totals.reduce_loss, 1.0, 1.0), torch.cuda.synchronize, partial(wait_tensor, True))
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_ident).result()
        assert not watchdog._doing(thread)[1]
        for wait in waits:
            waiting = pool.submit(wait)
            until_s = time.monotonic() + 20
            while not (doing := watchdog._doing(thread))[1] and time.monotonic() < until_s:
                time.sleep(0.01)
            numbers.put([[1.0, 1.0]])
            waiting.result(timeout=10)
            assert doing[1], doing


@pytest.mark.parametrize(
    ("module", "is_waiting"),
    [
        (distributed_c10d.__file__, True),
        (watchdog.__file__, True),
        (f"{Path(transformers.__file__).parent}/distributed/tensor_parallel.py", False),
        (f"{Path(torch.__file__).parent}/distributed/tensor/_dispatch.py", False),
        ("/opt/distributed/models/mine.py", False),
    ],
    ids=["c10d", "ours", "transformers", "DTensor", "installed"],
)
def test_rank_that_computes_below_a_folder_called_distributed_does_not_wait(module: str, is_waiting: bool) -> None:
    scope, numbers = dict[str, Any](), SimpleQueue[int]()
    exec(compile("def compute(get): get()", module, "exec"), scope)
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_ident).result()
        computing = pool.submit(scope["compute"], numbers.get)
        until_s = time.monotonic() + 20
        while not (doing := watchdog._doing(thread))[0].startswith("compute (") and time.monotonic() < until_s:
            time.sleep(0.01)
        numbers.put(0)
        computing.result(timeout=10)
    assert doing[0].startswith("compute (")
    assert doing[1] is is_waiting


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


def test_code_travels_from_the_error_to_whoever_reads_the_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = replace(OWN, error_code="shard.damaged", is_elsewhere=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv(AGENT, str(os.getppid()))
    report_exit(ending)
    left = read_report(json.loads((tmp_path / "error.json").read_text()))
    assert left == ending
    error = left.error
    assert (error.code, error.exit_code, error.is_elsewhere) == ("shard.damaged", 3, True)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    report_exit(ending, echo="json")
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "shard.damaged"


def test_joined_failures_keep_what_the_first_of_them_is() -> None:
    damaged = InputError("shard", "is damaged", "copy it", code="shard.damaged")
    damaged.exit_code = 4
    joined = join_failures({"rank 0": damaged, "rank 1": InputError("other", "is gone", code="shard.missing")})
    assert isinstance(joined, InputError)
    assert (joined.code, joined.exit_code, joined.hint, joined.where) == (
        "shard.damaged",
        4,
        "copy it",
        "rank 0: shard",
    )


def test_error_of_a_rank_alone_is_placed_once_and_keeps_its_code() -> None:
    placed = InputError("a.jsonl:3", "is no text", code="data.not-utf8").on_rank("rank 1")
    with pytest.raises(OneRankError) as error, errors_of_rank(1):
        raise placed
    assert (error.value.where, error.value.code, error.value.exit_code) == ("rank 1: a.jsonl:3", "data.not-utf8", 3)
