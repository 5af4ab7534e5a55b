"""A pack in parts on a real Slurm of this machine: an array, one of its tasks killed, and a commit that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import files_in, llama_config, random_tensors, write_model
from tests.servers.slurm import Slurm, missing_for_slurm, start_slurm

MISSING = missing_for_slurm()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no Slurm: {MISSING}")

ROOT = Path(__file__).resolve().parents[4]
CONFIG = llama_config(hidden_size=512, num_attention_heads=16, num_key_value_heads=1, intermediate_size=64,
                      num_hidden_layers=8, vocab_size=64)  # fmt: skip


def test_array_packs_what_one_process_packs_though_a_task_is_killed(tmp_path: Path) -> None:
    source, whole, out = tmp_path / "source", tmp_path / "whole", tmp_path / "out"
    write_model(source, CONFIG, random_tensors(CONFIG, dtypes=["F32"]), num_shards=2)
    command = [sys.executable, "-m", "reshard", "pack", str(source), "--layout", "pp=4"]
    subprocess.run([*command, "--out", str(whole)], cwd=ROOT, check=True, capture_output=True, timeout=60)
    (tmp_path / "slurm").mkdir()
    with start_slurm(tmp_path / "slurm", ("n1", "n2")) as slurm:
        environment = ("env", f"--chdir={tmp_path}", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1")
        said = slurm.run(*environment, *command, "--out", out, "--parts", "4", "--scheduler", "slurm").stdout
        array, ending = (line.rpartition(" ")[2] for line in said.splitlines())
        wait_until(lambda: kill_a_part(slurm), slurm)
        wait_until(lambda: set(states(slurm, array)) == {"COMPLETED"}, slurm)
        wait_until(lambda: states(slurm, ending) in (["COMPLETED"], ["FAILED"]), slurm)
        logs = [path.read_text() for path in tmp_path.glob("slurm-*.out")]
        assert states(slurm, ending) == ["COMPLETED"], logs
        assert any("Killed" in log for log in logs), logs
    assert files_in(out) == files_in(whole)


def jobs(slurm: Slurm, job: str) -> list[str]:
    shown = slurm.run("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i %T", check=False).stdout
    return shown.splitlines()


def states(slurm: Slurm, job: str) -> list[str]:
    return [line.split()[1] for line in jobs(slurm, job)]


def kill_a_part(slurm: Slurm) -> bool:
    """Kill the first process found that packs a part, on any node."""
    for node in slurm.network.nodes:
        for pid in slurm.network.pids(node):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"reshard" in words and b"--part" in words:
                    os.kill(pid, signal.SIGKILL)
                    return True
            except (OSError, ProcessLookupError):
                continue
    return False


def wait_until(is_so: Callable[[], bool], slurm: Slurm, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, slurm.run("squeue", "-t", "all", "-r", check=False).stdout
        time.sleep(0.05)
