"""Law 3 for training: whatever happens to a rank that saves, the last good checkpoint loads and training goes on."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from runner.checkpoint.history import checkpoint_path, find_checkpoints, step_of
from stores.open import open_manifest
from tests.builders import llama_config, pack, reshard, write_model
from tests.fast.runner.tiny import save_model
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said
from tests.process.torchrun import Rank, started
from tests.sentinels import plant_in

ENDLESS, LAST = 100_000, 30
SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2048}
KINDS = ("weights", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 2.4 million parameters, 29 MB in a checkpoint."""
    folder = tmp_path_factory.mktemp("saving")
    write_model(folder / "source", llama_config(**SIZES))
    return pack(folder / "source", folder / "packed")


def two_savers(
    packed: Path, history: Path, *args: object, folders: Sequence[Path] = (), **environment: str
) -> AbstractContextManager[list[Rank]]:
    """Start two ranks, each in its folder, which `history` may be relative to: so nodes have disks of their own."""
    words = (str(word) for word in (packed, history, *args))
    return started(2, "runner/checkpoint/save_worker.py", *words, folders=folders, **environment)


def check(checkpoint: Path) -> None:
    """See that a checkpoint is whole, and that every number in it is of its own step."""
    verified = reshard("verify", checkpoint)
    assert verified.code == 0, verified.out
    step, manifest = step_of(checkpoint), open_manifest(checkpoint).manifest
    assert manifest.training is not None
    assert manifest.training.step == step
    assert sorted(shard.holds for shard in manifest.shards) == sorted(2 * KINDS)
    for shard in manifest.shards:
        for tensor in load_file(checkpoint / shard.path).values():
            assert np.all(tensor == step)


def test_run_whose_folder_another_run_has_taken_over_saves_nothing_there(packed: Path, tmp_path: Path) -> None:
    """As when its machine was suspended for minutes. Whoever deletes the lock file does not stop its saves."""
    history = tmp_path / "history"
    with two_savers(packed, history, ENDLESS) as (rank, _):
        rank.wait_for("saved 1\n", timeout_s=60)
        (history / ".lock").unlink()
        rank.wait_for(f"saved {int(rank.said.split()[-1]) + 2}\n", timeout_s=60)
        owner = {"host": "elsewhere", "pid": 7, "birth": "another-boot 17", "namespace": "pid:[1]", "nonce": "0"}
        (history / ".lock").write_text(json.dumps({**owner, "doing": "saves checkpoints there"}))
        rank.wait_for(f"launch.folder-in-use at rank 0: --checkpoint {history}", timeout_s=60)
        before = sorted(history.iterdir())
        count = rank.said.count("failed")
        deadline_s = time.monotonic() + 60
        while rank.said.count("failed") < count + 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert sorted(history.iterdir()) == before


@pytest.mark.parametrize("num_kills", [3, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_rank_killed_while_saving_leaves_whole_checkpoints_and_the_next_run_goes_on(
    num_kills: int, packed: Path, tmp_path: Path
) -> None:
    history, chance, newest = tmp_path / "history", random.Random(num_kills), 0
    history.mkdir()
    sentinels = plant_in(history)
    for kill in range(num_kills):
        with two_savers(packed, history, ENDLESS) as ranks:
            ranks[0].wait_for(f"saved {newest + 1}\n", timeout_s=60)
            time.sleep(chance.uniform(0, 0.4))
            ranks[kill % 2].process.kill()
            assert [rank.wait(30) for rank in ranks] == ([-9, 1] if kill % 2 == 0 else [1, -9])
        sentinels.check()
        left = find_checkpoints(history)
        assert 1 <= len(left) <= 3  # the third is being taken away
        for checkpoint in left:
            check(checkpoint)
        newest = step_of(left[0]) or 0
    with two_savers(packed, history, newest + 1) as ranks:
        assert [rank.wait(30) for rank in ranks] == [0, 0]
    sentinels.check()
    assert sorted(path.name for path in history.glob("*step-*")) == [f"step-{newest:06d}", f"step-{newest + 1:06d}"]


def test_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_is_whole(packed: Path, tmp_path: Path) -> None:
    history = tmp_path / "history"
    with two_savers(packed, history, 3, 2) as ranks:
        assert (ranks[0].wait(60), ranks[1].wait(30)) == (0, 0), ranks[0].said
        out = ranks[0].said
    shard = f"{history}/.step-000002.partial/model-00002-of-00002.safetensors"
    assert out.splitlines() == ["saved 1", f"failed 2 output.unwritable at rank 1: {shard}", "saved 3"]
    assert sorted(path.name for path in history.iterdir()) == ["step-000001", "step-000003"]
    for checkpoint in find_checkpoints(history):
        check(checkpoint)


@pytest.mark.parametrize(
    ("left", "where"),
    [
        pytest.param((), "", marks=pytest.mark.slow),
        (("history/.step-000001.partial",), "/model-00002-of-00002.safetensors"),
    ],
    ids=["no folder", "a folder of that name"],
)
def test_save_to_a_folder_that_each_node_has_for_itself_is_never_committed(
    left: tuple[str, ...], where: str, packed: Path, tmp_path: Path
) -> None:
    folders = (tmp_path / "node0", tmp_path / "node1")
    for folder in (*folders, *(folders[1] / name for name in left)):
        folder.mkdir(parents=True)
    with two_savers(packed, Path("history"), 1, folders=folders) as ranks:
        assert (ranks[0].wait(60), ranks[1].wait(30)) == (0, 0), ranks[0].said
        out = ranks[0].said
    place = f"rank {int(not left)}: history/.step-000001.partial{where}"
    assert out == f"failed 1 checkpoint.not-shared at {place}\n"
    assert list((folders[0] / "history").iterdir()) == []
    assert (folders[1] / "history").exists() == bool(left)


@pytest.mark.slow
def test_save_on_a_slow_disk_may_take_longer_than_ranks_wait_for_each_other(packed: Path, tmp_path: Path) -> None:
    history = tmp_path / "history"
    with two_savers(packed, history, 1, SLOW_S="1.2", TIMEOUT_S="4") as ranks:
        assert (ranks[0].wait(60), ranks[1].wait(30), ranks[0].said) == (0, 0, "saved 1\n")
    check(checkpoint_path(history, 1))


@pytest.mark.slow
def test_pruning_may_take_longer_than_ranks_wait_for_each_other(packed: Path, tmp_path: Path) -> None:
    with two_savers(packed, tmp_path / "history", 4, PRUNING_S="1", TIMEOUT_S="4") as ranks:
        assert (ranks[0].wait(60), ranks[1].wait(30)) == (0, 0), ranks[1].said
        assert ranks[0].said.splitlines() == [f"saved {step}" for step in (1, 2, 3, 4)]
    assert [step_of(path) for path in find_checkpoints(tmp_path / "history")] == [4, 3]


def test_run_saves_although_the_folder_that_was_launched_is_gone(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "model" / "notes.txt").touch()
    packed, history = pack(tmp_path / "model", tmp_path / "packed", "pp=1"), tmp_path / "history"
    words = (
        packed / "manifest.json", "--data", "synthetic", "--seq-len", "16", "--checkpoint", history,
        "--log-dir", tmp_path / "log", "--steps", str(ENDLESS), "--no-self-check",
    )  # fmt: skip
    with started(1, "../../runner/train.py", *words) as (run,):
        run.wait_for("step 2/", timeout_s=60)
        packed.rename(tmp_path / "elsewhere")
        assert run.process.pid is not None
        os.kill(run.process.pid, signal.SIGUSR2)
        assert run.wait(60) == 130, run.said
    (checkpoint,) = find_checkpoints(history)
    assert reshard("verify", checkpoint).code == 0
    for file in open_manifest(checkpoint).manifest.files:
        assert (checkpoint / file.path).read_bytes() == (tmp_path / "elsewhere" / file.path).read_bytes()


def test_run_whose_last_save_fails_was_not_stopped_and_saved(tmp_path: Path) -> None:
    """The disk fills up, then the run is asked to stop."""
    save_model(tmp_path / "model", num_hidden_layers=1, vocab_size=1 << 13)
    pack(tmp_path / "model", tmp_path / "packed", "pp=1")
    history = tmp_path / "history"
    words = (
        tmp_path / "packed/manifest.json", "--data", "synthetic", "--seq-len", "16", "--checkpoint", history,
        "--checkpoint-sync", "--log-dir", tmp_path / "log", "--steps", str(ENDLESS), "--no-self-check",
    )  # fmt: skip
    with started(1, "../../runner/train.py", *words) as (run,):
        run.wait_for("step 2/", timeout_s=60)
        pid = run.process.pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        os.kill(pid, signal.SIGUSR2)
        code, said = run.wait(60), run.said
        assert code == 3, said
    problem = r"/model-00001-of-00001.safetensors: cannot be written: File too large \[output\.unwritable\]$"
    failed = re.search(f"^error: .*{problem}", said, re.MULTILINE)
    assert failed is not None, said
    assert "stopped" not in said
    assert not (tmp_path / "log/state.json").exists()
    assert find_checkpoints(history) == ()


def test_killed_training_resumes_from_its_newest_checkpoint_and_repeats_the_steps_after_it(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=2)
    pack(tmp_path / "model", tmp_path / "packed")
    history, log = tmp_path / "history", tmp_path / "log"
    training = (
        "--data", "synthetic", "--seq-len", "16", "--global-batch", "4", "--checkpoint", history,
        "--checkpoint-every", "5", "--keep", "3", "--resume", "auto", "--steps", str(LAST),
    )  # fmt: skip
    words = (tmp_path / "packed/manifest.json", *training, "--timeout", "8", "--log-dir", log, "--no-self-check")
    with started(2, "../../runner/train.py", *words) as ranks:
        ranks[0].wait_for("step-000010", 60)
        ranks[1].process.kill()
        assert [rank.wait(60) for rank in ranks] == [5, -9], ranks[0].said
    newest = step_of(find_checkpoints(history)[0])
    assert newest is not None
    run_jobs(2, [job(tmp_path / "packed", log, *training)])
    assert f"resuming from {history}/step-{newest:06d} at step {newest} " in said(log)
    losses = [(line["step"], line["loss"]) for line in lines_of(log) if "loss" in line]
    assert [step for step, _ in losses][newest - LAST :] == list(range(newest + 1, LAST + 1))
    assert len(set(losses)) == LAST  # a step that was taken twice had the same loss
