"""One rank fails in various ways: all others end soon, with one message and no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.launch.supervisor import agent_command
from tests.builders import flip, reshard, weights_path
from tests.process.forked import Forked
from tests.process.local_jobs import ROOT, SMALL, Run, are_gone, launched, pack_tiny, wait_until_gone
from tests.process.torchrun import launch, started

BROKEN = 1  # the rank that fails, and its stage
HOST = re.escape(socket.gethostname())
PLACE = f"rank {BROKEN}, stage {BROKEN}, node {HOST}"
MEMORY = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to a rank, and the code of the one error that the user sees."""

    name: str
    code: str
    number: signal.Signals = signal.SIGUSR1
    does: str = ""  # at SIGUSR1: a function of tests/process/failing
    limit_s: float = 120
    num_ranks: int = 2


@contextmanager
def limited(pid: int) -> Iterator[None]:
    """Let the kernel end a process that takes memory which it does not have yet."""
    group = MEMORY / f"runner-test-{pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "memory.limit_in_bytes").write_text("1M")
        yield
    finally:
        wait_until_gone([pid], 60)
        group.rmdir()


FAULTS = (
    Fault(name="killed", number=signal.SIGKILL, code="rank.killed", num_ranks=3),  # two survive it
    Fault(name="hangs in Python", does="sleep", limit_s=8 + 120, code="rank.stuck"),
)
# A process that does not react to SIGTERM gets SIGKILL from torchrun after 30 s.
SLOW_FAULTS = (
    Fault(name="out of memory", does="allocate", code="system.out-of-memory"),
    Fault(name="is stopped", number=signal.SIGSTOP, code="rank.silent", limit_s=8 + 120),
    Fault(name="hangs with Python's lock", does="sleep_with_lock", code="rank.silent", limit_s=8 + 120),
)


@pytest.mark.parametrize(
    "fault",
    [*FAULTS, *(pytest.param(fault, marks=pytest.mark.slow) for fault in SLOW_FAULTS)],
    ids=lambda fault: fault.name.replace(" ", "-"),
)
def test_rank_that_fails_ends_all_with_one_message_and_no_process_left(tmp_path: Path, fault: Fault) -> None:
    with failing(pack_tiny(tmp_path, fault.num_ranks), tmp_path, FAULT=fault.does) as run:
        run.wait_for_step(3)
        pids = run.ranks()
        begun_s = time.monotonic()
        os.kill(pids[BROKEN], fault.number)
        check_end(run, 5, PLACE, fault.code)
        assert time.monotonic() - begun_s < fault.limit_s
        wait_until_gone(pids, 60)


def failing(packed: Path, tmp_path: Path, *training: str, **fault: str) -> AbstractContextManager[Run]:
    path = os.pathsep.join((str(ROOT / "tests/process/failing"), str(ROOT)))
    return launched(packed, tmp_path / "log", "--steps", "100000", *training, PYTHONPATH=path, **fault)


def check_end(run: Run, exit_code: int, where: str, code: str) -> None:
    """Check that a job fails with an exit code and one error, at a place and with a code."""
    assert run.process.wait(timeout=200) == exit_code, run.said
    (message,) = re.findall(r"^error: .*(?:\n.*)*", run.said, re.MULTILINE)
    assert re.match(rf"error: {where}: ", message), message
    assert message == f"error: {run.state['error']}\n"
    assert (run.state["ended"], run.state["code"], run.state["error_code"]) == ("failed", exit_code, code)
    assert "Traceback" not in run.said


def test_rank_that_has_left_fails_no_rate_of_a_run_that_is_done() -> None:
    first, _ = launch(2, "runner/distributed/rate_worker.py")
    assert "rate: None" in first.splitlines()


def test_rank_without_a_gpu_beside_ranks_that_have_one_is_named_before_they_wait_for_it() -> None:
    ended = ["same kind", "same kind", "launch.too-few-gpus of rank 1"]
    assert [said.splitlines() for said in launch(2, "runner/distributed/kinds_worker.py")] == [ended, ended]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles for two ranks, of which the second has one flipped bit."""
    bad = pack_tiny(tmp_path_factory.mktemp("bad"), 2)
    shard = bad / weights_path(BROKEN, 2)
    flip(shard, -5)
    return bad


def damage(bad: Path) -> str:
    shard = re.escape(f"{bad}/{weights_path(BROKEN, 2)}")
    return rf"{PLACE}: {shard}: '.+'"


def run_all(
    command: Sequence[str | Path], environments: Sequence[dict[str, str]], place: Path
) -> tuple[list[int], list[str]]:
    """Fork a command in all these environments at once; return their exit codes and what they say of errors."""
    module, *words = map(str, command[command.index("-m") + 1 :])
    errors = [place / f"errors-{number}" for number in range(len(environments))]
    running = [
        Forked(words, {**os.environ, **environment}, Path(os.devnull), file, module)
        for environment, file in zip(environments, errors, strict=True)
    ]
    try:
        codes = [process.wait(timeout=150) for process in running]
    finally:
        for process in running:
            process.kill()
    return codes, [file.read_text() for file in errors]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


@pytest.mark.slow
def test_peers_of_a_rank_with_a_bad_shard_exit_with_code_5_and_one_of_them_reports(bad: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner.train", bad / "manifest.json", "--steps", "3", *SMALL]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    codes, said = run_all([*command, "--log-dir", tmp_path], ranks, tmp_path)
    assert codes == [5, 3], said
    assert re.search(rf"^error: {damage(bad)}: ", said[0], re.MULTILINE), said[0]
    assert said[1] == ""


def test_nodes_that_fail_together_print_one_message(bad: Path, tmp_path: Path) -> None:
    """The second finds the bad shard, and the first hears of it."""
    training = ("--steps", "3", *SMALL, "--log-dir", str(tmp_path))
    agent = agent_command(
        str(bad / "manifest.json"), training, nnodes=2, nproc_per_node=1, shutdown_s=8, python=sys.executable
    )
    meeting = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": free_port()}
    codes, said = run_all(agent, [{**meeting, "PET_NODE_RANK": str(number)} for number in range(2)], tmp_path)
    assert codes == [3, 3], said
    assert len(said[0].splitlines()) <= 1
    assert all(line.startswith("host memory: ") for line in said[0].splitlines())
    assert re.match(rf"error: {damage(bad)}: ", said[1])
    state = json.loads((tmp_path / "state.json").read_text())
    # A restart would fail the same way, see the exit codes in docs/cluster.md.
    assert (state["ended"], state["code"], state["error_code"]) == ("failed", 3, "shard.digest-mismatch")


@pytest.mark.parametrize(
    ("script", "flags"), [("train.py", (*SMALL, "--log-dir")), ("evaluation/evaluate.py", ("--data",))]
)
def test_rank_that_alone_does_not_see_the_manifest_says_who_it_is(
    tmp_path: Path, script: str, flags: tuple[str, ...]
) -> None:
    alone = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    with started(1, f"../../runner/{script}", tmp_path / "none.json", *flags, tmp_path, **alone) as (rank,):
        assert rank.wait(60) == 3, rank.said
        said = rank.said
    assert re.fullmatch(rf"error: rank 5, node {HOST}: {re.escape(str(tmp_path))}/none\.json: .+\nhint: .+\n", said)


@pytest.mark.slow
def test_disk_that_fails_under_one_rank_ends_all_with_code_5(packed: Path, tmp_path: Path) -> None:
    # The bytes may be intact, and a restart, or another node, may read them.
    with failing(packed, tmp_path, BROKEN_DISK=weights_path(BROKEN, 2)) as run:
        shard = re.escape(f"{packed}/{weights_path(BROKEN, 2)}")
        check_end(run, 5, f"{PLACE}: {shard}", "store.unreadable")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--checkpoint-sync",)], ids=str)
def test_disk_that_does_not_answer_under_one_rank_ends_all_once_they_wait_for_it(
    packed: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    saving = ("--checkpoint", str(tmp_path / "history"), "--checkpoint-every", "2", *flags)
    with failing(packed, tmp_path, *saving, HANGING_DISK=f"stage-00{BROKEN}") as run:
        run.wait_for_step(2)
        pids, begun_s = run.ranks(), time.monotonic()
        check_end(run, 5, PLACE, "checkpoint.stalled")
        assert time.monotonic() - begun_s < 8 + 30
        wait_until_gone(pids, 60)


@pytest.mark.slow
def test_disk_that_does_not_answer_ends_also_a_rank_that_has_met_something_else(tmp_path: Path) -> None:
    packed = pack_tiny(tmp_path / "models", 1)
    saving = ("--checkpoint", str(tmp_path / "history"), "--checkpoint-every", "1", "--timeout", "4")
    with failing(packed, tmp_path, *saving, "--lr", "1e30", HANGING_DISK="stage-000") as run:  # which step 2 refuses
        check_end(run, 5, rf"rank 0, stage 0, node {HOST}", "checkpoint.stalled")
        assert [beat["phase"] for beat in run.beats] == ["end"]


def test_disk_of_rank_0_that_does_not_answer_while_it_commits_ends_all_and_is_named(
    packed: Path, tmp_path: Path
) -> None:
    saving = ("--checkpoint", str(tmp_path / "history"), "--checkpoint-every", "2")
    with failing(packed, tmp_path, *saving, HANGING_DISK=".manifest.json.partial") as run:
        run.wait_for_step(2)
        pids = run.ranks()
        check_end(run, 5, "rank 0, [^:]*", "checkpoint.stalled")
        wait_until_gone(pids, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [(".lock", "0"), ("step-000002", r"\d")])
def test_disk_that_does_not_answer_as_a_save_begins_ends_all(
    packed: Path, tmp_path: Path, name: str, rank: str
) -> None:
    """Where rank 0 looks whether the folder is still its own, and where all read the checkpoint before."""
    saving = ("--checkpoint", str(tmp_path / "history"), "--checkpoint-every", "2")
    with failing(packed, tmp_path, *saving, HANGING_READS=name) as run:
        run.wait_for_step(2)
        pids = run.ranks()
        check_end(run, 5, f"rank {rank}, [^:]*", "checkpoint.stalled")
        wait_until_gone(pids, 60)


@pytest.mark.slow
def test_disk_that_does_not_answer_ends_all_although_another_one_is_published_to(packed: Path, tmp_path: Path) -> None:
    saving = ("--checkpoint", str(tmp_path / "history"), "--checkpoint-every", "9")
    publishing = ("--publish", str(tmp_path / "chain"), "--publish-every", "1")  # also while the save hangs
    with failing(packed, tmp_path, *saving, *publishing, HANGING_DISK=f"stage-00{BROKEN}") as run:
        check_end(run, 5, PLACE, "checkpoint.stalled")


@pytest.mark.slow
def test_weights_are_saved_before_a_run_waits_for_a_version_that_does_not_come(tmp_path: Path) -> None:
    packed, saved = pack_tiny(tmp_path / "models", 1), tmp_path / "saved"
    ending = ("--steps", "1", "--publish", str(tmp_path / "chain"), "--save", str(saved))
    with failing(packed, tmp_path, *ending, HANGING_DISK=".weight_v000001.partial") as run:
        check_end(run, 5, rf"rank 0, stage 0, node {HOST}", "checkpoint.stalled")
    assert reshard("verify", saved).code == 0


@pytest.mark.slow
def test_run_that_was_stopped_and_saved_says_so_before_it_waits_for_a_version(tmp_path: Path) -> None:
    packed, history = pack_tiny(tmp_path / "models", 1), tmp_path / "history"
    saving = ("--checkpoint", str(history), "--publish", str(tmp_path / "chain"), "--timeout", "60")
    with failing(packed, tmp_path, *saving, HANGING_DISK=".weight_v000001.partial") as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGUSR2)
        run.wait_until((run.log / "state.json").exists)
        assert run.state["ended"] == "stopped"
        assert not are_gone(run.ranks())
        assert [path.name for path in history.glob("step-*")] == [f"step-{run.state['step']:06d}"]


@pytest.mark.slow
def test_checkpoint_that_cannot_be_read_now_is_not_skipped_for_an_older_one(tmp_path: Path) -> None:
    packed = pack_tiny(tmp_path / "models", 1)
    saving = ("--checkpoint", str(tmp_path / "history"), "--checkpoint-every", "1", "--resume", "auto")
    with failing(packed, tmp_path, *saving, "--steps", "2") as run:
        assert run.process.wait(timeout=200) == 0, run.said
    run.output.unlink()
    unread = re.escape(f"{tmp_path}/history/step-000002/manifest.json")
    with failing(packed, tmp_path, *saving, "--steps", "3", BROKEN_DISK="step-000002") as run:
        check_end(run, 5, f"rank 0, stage 0, node .+: {unread}", "store.unreadable")
    with failing(packed, tmp_path, *saving, "--steps", "3") as run:
        assert run.process.wait(timeout=200) == 0, run.said
        assert f"resuming from {tmp_path}/history/step-000002 at step 2 " in run.said


@pytest.mark.slow
def test_rank_that_is_lost_while_the_run_stops_is_reported(packed: Path, tmp_path: Path) -> None:
    with failing(packed, tmp_path, "--checkpoint", str(tmp_path / "history"), FAULT="sleep") as run:
        run.wait_for_step(3)
        pids = run.ranks()
        os.kill(pids[BROKEN], signal.SIGUSR1)
        run.process.send_signal(signal.SIGUSR2)
        time.sleep(1)  # no step ends: they wait for the one that sleeps
        os.kill(pids[BROKEN], signal.SIGKILL)
        check_end(run, 5, rf"rank \d, stage \d, node {HOST}", "rank.lost")
        wait_until_gone(pids, 60)


@pytest.mark.slow
@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason=f"no memory groups to be made below {MEMORY}")
def test_rank_that_the_kernel_kills_for_its_memory_ends_all_with_one_message(packed: Path, tmp_path: Path) -> None:
    with failing(packed, tmp_path, FAULT="fill") as run:
        run.wait_for_step(3)
        pids = run.ranks()
        with limited(pids[BROKEN]):
            os.kill(pids[BROKEN], signal.SIGUSR1)
            check_end(run, 5, PLACE, "rank.killed")
        wait_until_gone(pids, 60)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_launcher_that_ends_takes_all_ranks_with_it(
    packed: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with launched(packed, tmp_path / "log", "--steps", "100000") as run:
        run.wait_for_step(3)
        pids = run.ranks()
        run.process.send_signal(number)
        assert run.process.wait(timeout=30) == code, run.said
        wait_until_gone(pids, 30)
    assert "Traceback" not in run.said
    assert "error: " not in run.said
    if code == 130:
        assert run.said.endswith(f"interrupted by {number.name}\n")


def test_a_refusal_that_torch_wraps_is_printed_without_a_traceback(tmp_path: Path) -> None:
    """As pipelining wraps what the recomputation of a layer refuses in a backward."""
    script = tmp_path / "wrapped.py"
    script.write_text("""
from manifests.errors import ModelError
from runner.distributed.rank_process import run_rank

def act(world):
    try:
        raise ModelError("--ac", "refused", code="model.not-recomputable")
    except ModelError as error:
        raise RuntimeError("wrapped") from error

run_rank(act)
""")
    with started(1, str(script)) as (rank,):
        assert (rank.wait(60), rank.said.count("\n")) == (3, 1), rank.said
        assert "--ac: refused [model.not-recomputable]" in rank.said


def test_rank_reports_its_own_error_although_the_others_cannot_be_reached(tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    script.write_text("""
import os

import torch

from manifests.errors import ShardError
from runner.distributed.fail_together import raise_on_all_ranks
from runner.distributed.rank_process import run_rank
from runner.distributed.world import join_world

def act(world):
    join_world(torch.device("cpu"), timeout_s=30)
    if world.rank == 0:
        os._exit(0)
    with raise_on_all_ranks("load"):
        raise ShardError("shard", "is damaged", code="shard.digest-mismatch")

run_rank(act)
""")
    with started(2, str(script)) as (_, rank):
        assert rank.wait(60) == 3, rank.said
        (line,) = rank.said.splitlines()
    assert re.fullmatch(rf"error: rank 1, node {HOST}: shard: .+ \[shard.digest-mismatch\]", line)


@pytest.mark.parametrize(
    ("reason", "exit_code", "code"),
    [
        ("uncorrectable ECC error encountered", 5, "rank.gpu-failed"),
        ("device-side assert triggered", 1, "rank.internal-error"),
    ],
)
def test_rank_whose_gpu_fails_ends_all_as_a_lost_rank_does(
    reason: str, exit_code: int, code: str, tmp_path: Path
) -> None:
    script = tmp_path / "gpu.py"
    script.write_text(f"""
import torch

from runner.distributed.fail_together import raise_on_all_ranks
from runner.distributed.rank_process import run_rank
from runner.distributed.world import join_world

def act(world):
    join_world(torch.device("cpu"), timeout_s=30)
    with raise_on_all_ranks("load"):
        if world.rank == 1:
            raise torch.AcceleratorError("CUDA error: {reason}")

run_rank(act)
""")
    with started(2, str(script)) as (other, rank):
        assert rank.wait(60) == exit_code, rank.said
        assert other.wait(60) == 5, other.said
        for said in (rank.said, other.said):
            assert re.match(rf"error: rank 1, node {HOST}: ", said), said
            assert f" [{code}]\n" in said
        assert f"\ntorch.AcceleratorError: CUDA error: {reason}\n" in f"{rank.said}\n"


def test_rank_reports_its_error_and_ends_although_its_log_does_not_answer(tmp_path: Path) -> None:
    script = tmp_path / "log.py"
    script.write_text("""
import logging
import time

from manifests.errors import ShardError
from runner.distributed import watchdog
from runner.distributed.rank_process import run_rank

class Hanging(logging.Handler):
    def emit(self, record):
        time.sleep(600)

def act(world):
    watchdog._LIMIT_S = 0.5
    logging.getLogger().addHandler(Hanging())
    raise ShardError("shard", "is damaged", code="shard.digest-mismatch")

run_rank(act)
""")
    with started(1, str(script)) as (rank,):
        assert rank.wait(60) == 3, rank.said
        assert "[shard.digest-mismatch]" in rank.said


def test_rank_that_gets_no_more_threads_reports_its_error_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text("""
import errno
import os
import threading

from runner.distributed.rank_process import run_rank

def act(world):
    threading.stack_size(1 << 60)  # which no thread gets
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

run_rank(act)
""")
    with started(1, str(script)) as (rank,):
        assert rank.wait(60) == 5, rank.said
        assert "[system.io]" in rank.said
        assert "Traceback" not in rank.said
