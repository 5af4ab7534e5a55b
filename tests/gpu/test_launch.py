"""`runner launch` and `runner prove` as users call them, on a machine with a GPU; on the CPU tests/process has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.builders import pack as pack_as
from tests.builders import run
from tests.fast.runner.tiny import save_model
from tests.gpu.jobs import pack
from tests.process.local_jobs import runner
from tests.process.runner.checkpoint.test_publish import check_steps, versions

pytestmark = [
    pytest.mark.process,
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: make test-gpu says what it would run"),
]
TRAINING = ("--data", "synthetic", "--seq-len", "64", "--global-batch", "8", "--microbatch", "2", "--dtype", "bf16")


def losses(log: Path) -> dict[int, float]:
    lines = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize(
    "flags",
    [
        ("--master-dtype", "fp32"),
        ("--compile",),
        ("--optimizer", "muon", "--ema", "0.9"),
        ("--lora-rank", "4"),
    ],
    ids=" ".join,
)
def test_run_is_checked_saved_resumed_and_exported(flags: tuple[str, ...], tmp_path: Path) -> None:
    save_model(tmp_path / "llama", num_hidden_layers=2)
    packed = pack(tmp_path / "llama", 1)

    def launch(log: str, steps: int, *more: object) -> None:
        where = ("--checkpoint", tmp_path / "saves", "--log-dir", tmp_path / log)
        ended = runner("launch", packed, "--", *TRAINING, *flags, "--steps", steps, *where, *more)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    seen = ("--trace", "2-3", "--profile", "2", "--memory-snapshot")
    launch("first", 4, "--checkpoint-every", 2, *seen, "--save", tmp_path / "trained")
    assert (tmp_path / "first" / "profile" / "memory-00000.pickle").stat().st_size
    merged = tmp_path / "merged.json"
    assert runner("report", tmp_path / "first", "--perfetto", merged).returncode == 0
    kernels = [event for event in json.loads(merged.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) > 50
    launch("second", 6, "--resume", "auto", "--no-self-check")
    before, after = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert (sorted(before), sorted(after)) == ([1, 2, 3, 4], [5, 6])
    assert max(after.values()) < max(before.values()) * 1.1
    if "--lora-rank" not in flags:
        run("export", tmp_path / "trained", "--to", "hf", "--out", tmp_path / "exported", "--quiet")


def test_published_versions_have_the_weights_of_their_steps(tmp_path: Path) -> None:
    """They are compared with the version before from the GPU, while training goes on."""
    save_model(tmp_path / "llama", num_hidden_layers=2)
    packed, chain, saves = pack(tmp_path / "llama", 1), tmp_path / "chain", tmp_path / "saves"
    where = ("--publish", chain, "--publish-every", 2, "--checkpoint", saves, "--checkpoint-every", 2)
    flags = ("--master-dtype", "fp32", "--lr", "1e-3", "--steps", 4, "--no-self-check")
    ended = runner("launch", packed, "--", *TRAINING, *flags, *where, "--log-dir", tmp_path / "log")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert versions(chain) == [(1, None), (2, 1)]
    check_steps(chain, saves, {1: 2, 2: 4}, tmp_path)


def test_ranks_of_a_proof_leave_gpus_alone(tmp_path: Path) -> None:
    """They are forked from a process whose imports asked for a GPU, and CUDA refuses such processes."""
    save_model(tmp_path / "llama", num_hidden_layers=4)
    ended = runner("prove", pack(tmp_path / "llama", 2), "--", *TRAINING)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU: NCCL refuses ranks that share it")
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("pp=2", ("--schedule", "1F1B")),  # with the tied weight on both ranks
        ("pp=2,vpp=2,style=v", ("--schedule", "ZBVZeroBubble")),
        ("pp=1", ("--dp-shard", "2")),
    ],
)
def test_ranks_that_have_gpus_of_their_own_train_as_one_does(
    layout: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """They exchange tensors over NCCL, save while they train, and gather what they have trained."""
    save_model(tmp_path / "llama", num_hidden_layers=4, tie_word_embeddings=True)

    def train(num_ranks: int, layout: str, *flags: str) -> dict[int, float]:
        place = tmp_path / str(num_ranks)
        place.mkdir()
        saving = ("--checkpoint", place / "saves", "--checkpoint-every", 2, "--save", place / "trained")
        flags = (*TRAINING[:-1], "fp32", "--steps", "4", "--no-self-check", *flags)
        packed, log = pack_as(tmp_path / "llama", place / "packed", layout), ("--log-dir", place / "log")
        ended = runner("launch", packed, "--nproc-per-node", num_ranks, "--", *flags, *saving, *log)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return losses(place / "log")

    assert train(2, layout, *flags) == pytest.approx(train(1, "pp=1"), rel=1e-4)
