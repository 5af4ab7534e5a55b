"""Law 3 for training: whatever happens to a rank that saves, the last good checkpoint loads and training goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from manifests.store import read_manifest
from runner.checkpoints.history import find_checkpoints, step_of
from tests.builders import llama_config, reshard, write_model
from tests.fast.runner.tiny import save_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = 100_000
SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2048}
KINDS = ("weights", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 2.4 million parameters, 29 MB in a checkpoint."""
    folder = tmp_path_factory.mktemp("saving")
    write_model(folder / "source", llama_config(**SIZES))
    assert reshard("pack", folder / "source", "--layout", "pp=2", "--out", folder / "packed").code == 0
    return folder / "packed"


@contextmanager
def two_savers(packed: Path, history: Path, *args: object) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "tests/process/save_worker.py", str(packed), str(history), *map(str, args)]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **meeting, "RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def check(checkpoint: Path) -> None:
    """See that a checkpoint is whole, and that every number in it is of its own step."""
    verified = reshard("verify", checkpoint)
    assert verified.code == 0, verified.out
    step, manifest = step_of(checkpoint), read_manifest(checkpoint)
    assert manifest.training is not None
    assert manifest.training.step == step
    assert sorted(shard.holds for shard in manifest.shards) == sorted(2 * KINDS)
    for shard in manifest.shards:
        for tensor in load_file(checkpoint / shard.path).values():
            assert np.all(tensor == step)


@pytest.mark.parametrize("num_kills", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_rank_killed_while_saving_leaves_whole_checkpoints_and_the_next_run_goes_on(
    num_kills: int, packed: Path, tmp_path: Path
) -> None:
    history, chance, newest = tmp_path / "history", random.Random(num_kills), 0
    for kill in range(num_kills):
        with two_savers(packed, history, ENDLESS) as ranks:
            assert ranks[0].stdout is not None
            assert ranks[0].stdout.readline() == f"saved {newest + 1}\n"
            time.sleep(chance.uniform(0, 0.4))
            ranks[kill % 2].kill()
            assert [rank.wait(30) for rank in ranks] == ([-9, 1] if kill % 2 == 0 else [1, -9])
        left = find_checkpoints(history)
        assert 1 <= len(left) <= 3  # the third is being taken away
        for checkpoint in left:
            check(checkpoint)
        newest = step_of(left[0]) or 0
    with two_savers(packed, history, newest + 1) as ranks:
        assert [rank.wait(30) for rank in ranks] == [0, 0]
    assert sorted(path.name for path in history.iterdir()) == [f"step-{newest:06d}", f"step-{newest + 1:06d}"]


def test_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_is_whole(packed: Path, tmp_path: Path) -> None:
    history = tmp_path / "history"
    with two_savers(packed, history, 3, 2) as ranks:
        out, errors = ranks[0].communicate(timeout=60)
        assert (ranks[0].wait(30), ranks[1].wait(30)) == (0, 0), errors
    shard = f"{history}/.step-000002.partial/stage-001/model.safetensors"
    assert out.splitlines() == ["saved 1", f"failed 2 rank 1: {shard}: cannot be written: File too large", "saved 3"]
    assert sorted(path.name for path in history.iterdir()) == ["step-000001", "step-000003"]
    for checkpoint in find_checkpoints(history):
        check(checkpoint)


def test_second_run_that_would_save_into_the_same_folder_is_refused(packed: Path, tmp_path: Path) -> None:
    history = tmp_path / "history"
    with two_savers(packed, history, ENDLESS) as ranks:
        assert ranks[0].stdout is not None
        ranks[0].stdout.readline()
        with two_savers(packed, history, ENDLESS) as others:
            _, errors = others[0].communicate(timeout=30)
        assert others[0].returncode == 1
        assert errors == f"rank 0: {history}: another process is writing it\nhint: wait for that one, or stop it\n"


def test_killed_training_resumes_from_its_newest_checkpoint_and_repeats_the_steps_after_it(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=2)
    assert reshard("pack", tmp_path / "model", "--layout", "pp=2", "--out", tmp_path / "packed").code == 0
    command = [
        sys.executable, "-m", "runner.cli", "launch", str(tmp_path / "packed"), "--", "--data", "synthetic",
        "--seq-len", "16", "--checkpoint", str(tmp_path / "history"), "--checkpoint-every", "5", "--keep", "3",
        "--resume", "auto", "--log-dir", str(tmp_path), "--steps", "200",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        next(line for line in run.stdout if "saved" in line)
        next(line for line in run.stdout if "saved" in line)
        os.kill(worker_of(run.pid), signal.SIGKILL)
        run.stdout.read()
        assert run.wait(60) == 5
    newest = step_of(find_checkpoints(tmp_path / "history")[0])
    assert newest is not None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"going on from {tmp_path}/history/step-{newest:06d}: step {newest}, " in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in losses][newest - 200 :] == list(range(newest + 1, 201))
    assert len(set(losses)) == 200  # a step that was taken twice had the same loss


def worker_of(agent: int) -> int:
    """Give the process of rank 1."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return next(int(pid) for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
