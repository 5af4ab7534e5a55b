"""Jobs on a real Slurm of this machine: submitted, watched, killed, preempted and gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.local_jobs import pack_tiny
from tests.servers.slurm import REQUEUE_S, SAFE_REQUEUE_S, Slurm, missing_for_slurm, start_slurm

MISSING = missing_for_slurm()
pytestmark = [pytest.mark.timeout(420), pytest.mark.skipif(MISSING is not None, reason=f"no Slurm: {MISSING}")]

ROOT = Path(__file__).resolve().parents[4]
TRAINING = ("--data", "synthetic", "--seq-len", "16", "--global-batch", "48", "--microbatch", "1", "--timeout", "60",
            "--no-self-check")  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_tiny(tmp_path_factory.mktemp("models"), 4)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with start_slurm(tmp_path_factory.mktemp("slurm"), ("node2", "node10")) as cluster:
        yield cluster


def runner(slurm: Slurm, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return slurm.run("env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", sys.executable, "-m", "runner.cli",
                     *arguments, check=check)  # fmt: skip


def submit(slurm: Slurm, packed: Path, log: Path, *training: str | Path, flags: tuple[str, ...] = ()) -> None:
    where = ("--scheduler", "slurm", "--nnodes", "2", "--nproc-per-node", "2", "--name", "tiny", "--log-dir", log)
    runner(slurm, "launch", packed, *where, *flags, "--", *TRAINING, *training)


def state(slurm: Slurm, log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(runner(slurm, "status", log, "--json").stdout)
    return found


def wait_for_end(slurm: Slurm, log: Path, limit_s: float = 240) -> str:
    deadline = time.monotonic() + limit_s
    while (found := state(slurm, log))["state"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        assert time.monotonic() < deadline, f"{found}\n{runner(slurm, 'logs', log, check=False).stdout}"
        time.sleep(0.5)
    return str(found["state"])


def losses(log: Path) -> dict[int, float]:
    """Give the loss of each step; one taken twice counts as it was taken last."""
    lines = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_job_over_two_nodes_trains_and_is_watched_by_its_log_folder(
    slurm: Slurm, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_JOB_NAME", "another")  # a job's own flags win
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    log = tmp_path / "it's a log, 100%j of it"
    submit(slurm, packed, log, "--steps", "3", flags=("--time", "7"))
    shown = slurm.run("scontrol", "show", "job", "-o", json.loads((log / "job.json").read_text())["id"]).stdout
    assert "JobName=tiny " in shown
    assert "TimeLimit=00:07:00 " in shown
    assert wait_for_end(slurm, log) == "COMPLETED", runner(slurm, "logs", log).stdout
    assert sorted(losses(log)) == [1, 2, 3]
    said = runner(slurm, "logs", log).stdout
    assert "step 3/3" in said
    assert runner(slurm, "status", log).stdout.splitlines()[1] == f"step 3 of 3, loss {losses(log)[3]:.6f}"


def test_more_nodes_than_there_are_and_a_partition_that_is_none_are_refused(
    slurm: Slurm, packed: Path, tmp_path: Path
) -> None:
    asked = ("launch", packed, "--scheduler", "slurm", "--log-dir", tmp_path)
    done = runner(slurm, *asked, "--nnodes", "4", "--", *TRAINING, check=False)
    assert done.returncode == 2
    assert "found 4: partition main has 2" in done.stderr
    done = runner(slurm, *asked, "--partition", "absent", "--", *TRAINING, check=False)
    assert done.returncode == 3
    assert "invalid partition specified: absent" in done.stderr
    assert not (tmp_path / "job.json").exists()


def test_job_that_slurm_has_forgotten_is_known_by_what_it_left(slurm: Slurm, tmp_path: Path) -> None:
    record = {"version": 1, "scheduler": "slurm", "id": "999999", "name": "tiny", "output": str(tmp_path / "out")}
    (tmp_path / "job.json").write_text(json.dumps(record))
    assert state(slurm, tmp_path)["state"] == "FORGOTTEN"
    (tmp_path / "state.json").write_text(json.dumps({"version": 1, "step": 3, "ended": "done"}))
    found = state(slurm, tmp_path)
    assert (found["id"], found["state"]) == ("999999", "COMPLETED")


@pytest.fixture(scope="module")
def uninterrupted(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Give the losses of 40 steps on this machine, without Slurm."""
    log = tmp_path_factory.mktemp("uninterrupted")
    command: list[str | Path] = [sys.executable, "-m", "runner.cli", "launch", packed, "--", *TRAINING, "--steps", "40"]
    subprocess.run([*command, "--log-dir", log], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
                   capture_output=True, timeout=120)  # fmt: skip
    return losses(log)


def begin_long(slurm: Slurm, packed: Path, tmp_path: Path, *flags: str) -> Path:
    """Submit a run of 40 steps, and wait until it has saved one of them."""
    log, history = tmp_path / "log", tmp_path / "history"
    saving = ("--checkpoint", history, "--checkpoint-every", "5", "--resume", "auto")
    submit(slurm, packed, log, "--steps", "40", *saving, flags=flags)
    wait_until(lambda: (history / "step-000005" / "manifest.json").is_file(), slurm, log)
    return log


def wait_until(is_so: Callable[[], bool], slurm: Slurm, log: Path, limit_s: float = 150) -> float:
    """Wait for something to come true, and give the seconds that it took."""
    begun = time.monotonic()
    while not is_so():
        said = runner(slurm, "logs", log, check=False).stdout
        assert time.monotonic() < begun + limit_s, f"{state(slurm, log)}\n{said}"
        time.sleep(0.2)
    return time.monotonic() - begun


def hosts_of_ranks(log: Path) -> list[str]:
    beats = sorted((log / "heartbeat").glob("rank-*.json"))
    return [json.loads(beat.read_text())["host"] for beat in beats]


def ranks_on(slurm: Slurm, node: str) -> list[int]:
    """Give the processes of a node's ranks: the children of its agent."""
    agents = [pid for pid in slurm.network.pids(node) if "runner.launch.agent.agent" in command_of(pid)]
    return [int(pid) for agent in agents for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_killed_rank_is_started_again_from_the_last_checkpoint_within_a_minute(
    slurm: Slurm, packed: Path, tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    log = begin_long(slurm, packed, tmp_path, "--restarts", "1")
    os.kill(ranks_on(slurm, "node10")[0], signal.SIGKILL)
    said = log / "rank-00000.log"
    assert wait_until(lambda: said.read_text().count("resuming from") == 1, slurm, log) < 60
    assert wait_for_end(slurm, log) == "COMPLETED", runner(slurm, "logs", log).stdout
    assert losses(log) == uninterrupted


@pytest.mark.slow
def test_preempted_job_saves_is_queued_again_and_loses_nothing(
    slurm: Slurm, packed: Path, tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    log = begin_long(slurm, packed, tmp_path, "--requeue")
    hosts = hosts_of_ranks(log)
    assert hosts == ["node2", "node2", "node10", "node10"]
    urgent = slurm.run("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "--output=/dev/null",
                       "--wrap", "sleep 1").stdout.strip()  # fmt: skip
    wait_until(lambda: "COMPLETED" in slurm.run("scontrol", "show", "job", urgent).stdout, slurm, log)
    assert wait_for_end(slurm, log) == "COMPLETED", runner(slurm, "logs", log).stdout
    assert state(slurm, log)["requeues"] == 1
    assert "stopped by a signal after step" in runner(slurm, "logs", log).stdout
    assert losses(log) == uninterrupted
    assert hosts_of_ranks(log) == hosts


@pytest.mark.slow
def test_job_that_is_told_to_stop_before_its_ranks_have_begun_is_queued_again(
    slurm: Slurm, packed: Path, tmp_path: Path
) -> None:
    log, saving = tmp_path / "log", ("--checkpoint", tmp_path / "history", "--resume", "auto")
    submit(slurm, packed, log, "--steps", "3", *saving, flags=("--requeue", "--restarts", "3"))

    def has_agents() -> bool:
        nodes = [slurm.network.pids(node) for node in ("node2", "node10")]
        return all(any("runner.launch.agent.agent" in command_of(pid) for pid in pids) for pids in nodes)

    wait_until(has_agents, slurm, log)
    slurm.run("scancel", "--signal=USR2", json.loads((log / "job.json").read_text())["id"])  # as --signal does
    assert wait_for_end(slurm, log) == "COMPLETED", runner(slurm, "logs", log).stdout
    assert state(slurm, log)["requeues"] == 1
    assert runner(slurm, "logs", log).stdout.count("the job was requeued\n") == 1
    assert sorted(losses(log)) == [1, 2, 3]


@pytest.mark.slow
def test_job_whose_node_dies_is_queued_again_and_loses_nothing(
    packed: Path, tmp_path: Path, uninterrupted: dict[int, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("slurm")  # a short name: below it are sockets, whose paths have 108 bytes at most
    with start_slurm(place, ("node2", "node10"), requeue_s=SAFE_REQUEUE_S) as slurm:
        lose_a_node(slurm, packed, tmp_path, uninterrupted)


def lose_a_node(slurm: Slurm, packed: Path, tmp_path: Path, uninterrupted: dict[int, float]) -> None:
    log = begin_long(slurm, packed, tmp_path, "--requeue")
    slurm.network.kill("node10")
    wait_until(lambda: state(slurm, log)["requeues"] == 1, slurm, log, limit_s=120)
    slurm.start_node("node10")
    assert wait_for_end(slurm, log) == "COMPLETED", runner(slurm, "logs", log).stdout
    assert losses(log) == uninterrupted


def test_cancelled_job_saves_ends_and_leaves_no_process(slurm: Slurm, packed: Path, tmp_path: Path) -> None:
    log = begin_long(slurm, packed, tmp_path)
    runner(slurm, "cancel", log)
    assert wait_for_end(slurm, log) == "CANCELLED"
    wait_until(lambda: not [*ranks_on(slurm, "node2"), *ranks_on(slurm, "node10")], slurm, log)
    left = json.loads((log / "state.json").read_text())
    assert left["ended"] == "stopped", runner(slurm, "logs", log).stdout
    assert (tmp_path / "history" / f"step-{left['step']:06d}" / "manifest.json").is_file()


@pytest.mark.slow
def test_signal_to_the_batch_script_alone_stops_the_job_after_a_checkpoint(
    slurm: Slurm, packed: Path, tmp_path: Path
) -> None:
    log = begin_long(slurm, packed, tmp_path)
    slurm.run("scancel", "--batch", "--signal=TERM", json.loads((log / "job.json").read_text())["id"])
    assert wait_for_end(slurm, log) == "FAILED"
    left = json.loads((log / "state.json").read_text())
    assert left["ended"] == "stopped", runner(slurm, "logs", log).stdout
    assert (tmp_path / "history" / f"step-{left['step']:06d}" / "manifest.json").is_file()


@pytest.mark.slow
def test_cancelled_job_is_not_queued_again_although_it_may_be(slurm: Slurm, packed: Path, tmp_path: Path) -> None:
    log = begin_long(slurm, packed, tmp_path, "--requeue")
    runner(slurm, "cancel", log)
    wait_until(lambda: not [*ranks_on(slurm, "node2"), *ranks_on(slurm, "node10")], slurm, log)
    time.sleep(REQUEUE_S + 5)  # by when Slurm would have started it again
    assert state(slurm, log)["state"] == "CANCELLED"
    assert state(slurm, log)["requeues"] == 0


@pytest.mark.slow
def test_job_whose_rank_dies_at_each_start_ends_before_its_restarts_do_and_says_why(
    slurm: Slurm, packed: Path, tmp_path: Path
) -> None:
    log, failing = tmp_path / "log", f"{ROOT}/tests/process/failing:{ROOT}"
    saving = ("--checkpoint", tmp_path / "history", "--resume", "auto")
    broken = ("--restarts", "5", "--env", f"PYTHONPATH={failing}", "--env", "DIE_RANK=3")
    submit(slurm, packed, log, "--steps", "40", *saving, flags=broken)
    assert wait_for_end(slurm, log) == "FAILED"
    said = runner(slurm, "logs", log).stdout
    first, second, last = [line for line in said.splitlines() if line.startswith("error: ")]  # srun says its own
    assert first == second
    assert first.startswith("error: rank 3, stage 3, node node10: ")
    assert json.loads((log / "state.json").read_text())["error_code"] == "rank.killed"
    assert "since the last restart (there is none)" in last
    shown = state(slurm, log)["error"]
    assert shown.startswith(f"{last.removeprefix('error: ')}\n{first.removeprefix('error: ')}\n")
    assert f"error: {shown}\n" in runner(slurm, "status", log).stdout
