"""Runs that freeze parameters: frozen bytes stay, and a run resumes on another layout as if it had not stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.formats.open import open_source
from tests.builders import pack, refusal, run
from tests.process.local_jobs import forked_runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FLAGS = ("--data", "synthetic", "--seq-len", "16", "--decay-steps", "9", "--no-self-check", "--device", "cpu")


def train(manifest: Path, log: Path, *flags: str | Path, launch: tuple[str, ...] = ()) -> list[float]:
    """Train, and return the loss of each step."""
    ended = forked_runner("launch", manifest, *launch, "--log-dir", log, "--", *FLAGS, *flags)
    assert ended.returncode == 0, ended.stderr
    records = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record and "grad_norm" in record]


def test_adapters_resume_on_another_layout_as_if_training_had_not_stopped(packed: Path, tmp_path: Path) -> None:
    lora = ("--lora-rank", "4", "--lr", "1e-2")
    straight = train(packed, tmp_path / "a", *lora, "--steps", "4")
    checkpoints = tmp_path / "checkpoints"
    first = train(packed, tmp_path / "b", *lora, "--steps", "2", "--checkpoint", checkpoints)
    alone = pack(packed, tmp_path / "alone", "pp=1")
    more = train(alone, tmp_path / "c", *lora, "--steps", "4", "--checkpoint", checkpoints, "--resume", "auto",
                 "--save", tmp_path / "adapter")  # fmt: skip
    tensor = ("--steps", "4", "--tp", "2", "--resume", checkpoints / "step-000002")
    shared = train(packed, tmp_path / "d", *lora, *tensor, launch=("--nproc-per-node", "4"))
    assert shared == pytest.approx(straight[2:], rel=5e-6)
    assert [*first, *more] == pytest.approx(straight, rel=1e-6)
    run("verify", checkpoints / "step-000004")
    assert refusal("pack", checkpoints / "step-000004", "--layout", "pp=1", "--out", tmp_path / "no").found[:2] == (
        3, "manifest.adapters-alone",
    )  # fmt: skip
    run("merge", packed, tmp_path / "adapter", "--out", tmp_path / "merged")
    run("merge", alone, tmp_path / "adapter", "--out", tmp_path / "merged-alone")
    assert refusal("merge", tmp_path / "merged", checkpoints / "step-000004", "--out", tmp_path / "no").found[:2] == (
        3, "source.bad-adapter",
    )  # fmt: skip


def test_frozen_weights_keep_their_bytes_and_have_no_optimizer_state(packed: Path, tmp_path: Path) -> None:
    only = ("--train-only", r"layers\.1\.", "--lr", "1e-2")
    checkpoints = tmp_path / "checkpoints"
    train(packed, tmp_path / "a", *only, "--steps", "2", "--checkpoint", checkpoints)
    run("verify", checkpoints / "step-000002")
    alone = pack(checkpoints / "step-000002", tmp_path / "alone", "pp=1")
    before, after = open_source(str(packed)), open_source(str(alone))
    changed = {fqn for fqn, tensor in before.tensors.items() if tensor.digest != after.tensors[fqn].digest}
    assert changed == {fqn for fqn in before.tensors if "layers.1." in fqn}
    assert all(moments.keys() == changed for moments in after.moments.values())
    assert len(train(alone, tmp_path / "b", *only, "--steps", "3", "--resume", "auto")) == 1
