"""A place that many processes claim at once: one gets it, the others are told who has it, and the dead lose it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from manifests.errors import InputError
from stores.folders.lock import Process, locking
from tests.process.local_jobs import ROOT, SMALL, forked_runner
from tests.process.torchrun import started

HOLD = """
import sys, time
from pathlib import Path
from stores.folders.lock import locking
from manifests.errors import InputError
sys.stdin.readline()
try:
    with locking(Path(sys.argv[1]), "place", "holds it"):
        print("has it", flush=True)
        sys.stdin.readline()
except InputError as error:
    print(error.code, error.problem, flush=True)
"""
# No file system passes locks on, as where machines share one that keeps them to itself.
UNLOCKED = "import fcntl\ndef no(*_): raise OSError(38, 'Function not implemented')\nfcntl.flock = no\n"


def hold(path: Path, before: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", before + HOLD, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def record(path: Path, **changes: object) -> None:
    """Leave the claim of a process of another machine, or what else the changes make of it."""
    own = {"host": "elsewhere", "pid": 7, "birth": "another-boot 17", "namespace": "pid:[1]", "nonce": "0"}
    path.write_text(json.dumps({**own, "doing": "holds it", **changes}))


@pytest.mark.parametrize("round_number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))])
def test_of_many_that_claim_at_once_one_has_it_and_is_named_to_the_others(tmp_path: Path, round_number: int) -> None:
    processes = [hold(tmp_path / "claim") for _ in range(6)]
    try:
        for process in processes:
            begin(process)
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(answer, processes))
        assert answers.count("has it\n") == 1, answers
        winner = processes[answers.index("has it\n")]
        for said in answers:
            assert said == "has it\n" or f"process {winner.pid} " in said
        begin(winner)
        assert winner.wait(timeout=30) == 0
        assert list(tmp_path.iterdir()) == []
    finally:
        end(*processes)


@pytest.mark.parametrize("before", ["", UNLOCKED], ids=["locks", "no-locks"])
def test_claim_of_a_killed_holder_is_taken_over_at_once_and_that_of_a_live_one_is_not(
    tmp_path: Path, before: str
) -> None:
    first, second, third = (hold(tmp_path / "claim", before) for _ in range(3))
    try:
        begin(first)
        assert answer(first) == "has it\n"
        begin(second)
        assert answer(second).startswith("launch.folder-in-use process ")
        first.kill()
        first.wait()
        begin(third)
        assert answer(third) == "has it\n"
    finally:
        end(first, second, third)


def test_lock_that_a_child_of_a_dead_holder_keeps_does_not_keep_the_claim(tmp_path: Path) -> None:
    forks = """
import stores.folders.lock, os, time
acquire = stores.folders.lock._acquire
def forking(*given):
    found = acquire(*given)
    if not os.fork():
        os.closerange(0, 3)
        time.sleep(10)
        os._exit(0)
    return found
stores.folders.lock._acquire = forking
"""
    first, second = hold(tmp_path / "claim", forks), hold(tmp_path / "claim")
    try:
        begin(first)
        assert answer(first) == "has it\n"
        first.kill()
        first.wait()
        begin(second)
        assert answer(second) == "has it\n"
    finally:
        end(first, second)


def test_claim_on_another_machine_is_kept_while_it_is_touched_and_taken_over_when_it_is_not(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    record(path)
    with ThreadPoolExecutor(1) as pool:
        is_over = False

        def touch() -> None:
            while not is_over:
                os.utime(path)
                time.sleep(0.05)

        touching = pool.submit(touch)
        with pytest.raises(InputError) as error, locking(path, "place", "waits", stale_s=1):
            pass
        is_over = True
        touching.result()
    assert (error.value.code, error.value.where) == ("launch.folder-in-use", "place")
    assert "process 7 on elsewhere" in error.value.problem
    with locking(path, "place", "took over", stale_s=1):
        assert json.loads(path.read_bytes())["doing"] == "took over"
    assert not path.exists()


def test_claim_that_another_machine_has_taken_over_is_left_to_it(tmp_path: Path) -> None:
    """As from a machine that was suspended: there, the file is the same one."""
    path = tmp_path / "claim"
    with locking(path, "place", "holds it") as check:
        check()
        record(path)
        with pytest.raises(InputError, match="process 7 on elsewhere") as error:
            check()
        assert error.value.code == "launch.folder-in-use"
    assert path.exists()


def test_process_with_the_number_of_a_dead_holder_is_not_taken_for_it(tmp_path: Path) -> None:
    mine = Process()
    record(tmp_path / "claim", pid=mine.pid, birth=f"{mine.birth.split()[0]} 1", namespace=mine.namespace)
    with locking(tmp_path / "claim", "place", "took over"):
        pass


def test_claim_of_another_user_whose_processes_are_hidden_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on login nodes, whose /proc is mounted with hidepid=2: its heartbeats show that it is alive."""
    monkeypatch.setattr("stores.folders.lock._BEAT_S", 0.5)
    hidden = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
    hiding = ["unshare", "-m", "sh", "-c", hidden, "sh"]
    tried = subprocess.run([*hiding, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"NOT TESTED: hidden processes. This user may not mount /proc: {tried.stderr.strip()}")
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = Path(folder) / "claim"
        with locking(path, "place", "holds it"):
            path.chmod(0o666)
            command = [*hiding, sys.executable, "-c", HOLD, path]
            other = subprocess.run(command, cwd=ROOT, input="\n\n", capture_output=True, text=True, timeout=60)
            assert other.stdout.startswith(f"launch.folder-in-use process {os.getpid()} on ")


@pytest.mark.parametrize("damage", [{"pid": 1e400}, {"birth": None}, {"host": []}, "[" * 60_000, "[]", ""], ids=str)
def test_damaged_claim_is_taken_over(damage: dict[str, object] | str, tmp_path: Path) -> None:
    path = tmp_path / "claim"
    path.write_text(damage) if isinstance(damage, str) else record(path, **damage)
    with locking(path, "place", "took over", stale_s=0.1):
        pass


def test_two_launches_into_one_log_folder_at_once_start_one_job(packed_alone: Path, tmp_path: Path) -> None:
    words = ["launch", str(packed_alone), "--log-dir", str(tmp_path / "log"), "--", *SMALL, "--steps", "2"]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: forked_runner(*words), range(2)))
    codes = sorted(each.returncode for each in done)
    assert codes[0] == 0, [each.stderr for each in done]
    assert codes[1] in (2, 3), [each.stderr for each in done]
    refused = next(each for each in done if each.returncode)
    assert refused.stderr.startswith(f"error: --log-dir {tmp_path / 'log'}: "), refused.stderr


@pytest.mark.parametrize("flag", ["--save", pytest.param("--checkpoint", marks=pytest.mark.slow)])
def test_second_run_that_would_save_to_the_same_place_is_refused_before_it_trains(
    flag: str, packed_alone: Path, tmp_path: Path
) -> None:
    words = (packed_alone / "manifest.json", *SMALL, "--steps", "100000", flag, tmp_path / "out", "--log-dir")
    with started(1, "../../runner/train.py", *words, tmp_path / "log") as (first,):
        first.wait_for("step 1/", 60)
        with started(1, "../../runner/train.py", *words, tmp_path / "other") as (second,):
            assert second.wait(60) == 3, second.said
            assert f"{flag} {tmp_path / 'out'}: process {first.process.pid} on " in second.said
            assert "step 1/" not in second.said
