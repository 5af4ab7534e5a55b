"""Training goes from torchtitan's trainer to the runner and back, as if torchtitan had gone on by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from runner.config.schema import BatchOptions, DataOptions
from runner.data.sequences import read_batches
from tests.fast.reshard.formats.dcp.test_dcp_export import assert_contains, run, state_of
from tests.fast.titans import LLAMA
from tests.process.runner.training_jobs import job, lines_of, run_jobs
from tests.process.torchrun import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FSDP, PP = {"pp": 1, "dp": 2}, {"pp": 2, "dp": 1}
# What torchtitan's warmup_steps=2, total_steps=10, decay_ratio=0.6 and decay_type="cosine" are in the runner.
SCHEDULE = ("--lr", "8e-3", "--warmup-steps", "2", "--stable-steps", "2", "--decay", "cosine", "--decay-steps", "10")
BATCH = ("--seq-len", "16", "--global-batch", "4", "--microbatch", "1", "--data", "synthetic", "--seed", "1")


def titan(folder: Path, degrees: Mapping[str, object], **job: Any) -> dict[int, float]:
    """Train with torchtitan until step 9, saving every 3 steps, and return the loss of each step."""
    folder.mkdir(parents=True, exist_ok=True)
    fixed = {"folder": str(folder), "steps": 9, "out": str(folder / "losses.json")}
    (folder / "job.json").write_text(json.dumps({**fixed, **degrees, **job}))
    launch(2, "runner/models/titan_worker.py", folder / "job.json")
    return {int(step): loss for step, loss in json.loads((folder / "losses.json").read_text()).items()}


@pytest.mark.parametrize(("before", "after", "fused"), [(FSDP, PP, True), (PP, FSDP, False)], ids=["fsdp", "pp"])
def test_training_goes_from_torchtitan_to_the_runner_and_back(
    before: Mapping[str, int], after: Mapping[str, int], fused: bool, tmp_path: Path
) -> None:
    data = [[0, 12], [1, 12], [2, 0]]
    alone = titan(tmp_path / "alone", before, fused=fused, data=data)
    source = tmp_path / "alone" / "checkpoint" / "step-3"
    (source / "config.json").write_text(json.dumps(LLAMA))
    run("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "dcp", "--for", "torchtitan", "--out", tmp_path / "again")
    kept = {key: value for key, value in state_of(source).items() if key[0] != "dataloader"}
    kept.pop(("train_state", "ntokens_seen"))  # of one data-parallel rank there, of all of them here
    assert_contains(state_of(tmp_path / "again"), kept)

    args = (*SCHEDULE, *BATCH, "--resume", "auto", "--steps", "6", "--checkpoint", tmp_path / "history")
    run_jobs(2, [job(tmp_path / "packed", tmp_path / "log", *args)])
    ours = {line["step"]: line["loss"] for line in lines_of(tmp_path / "log") if "loss" in line}

    back = tmp_path / "back" / "checkpoint" / "step-6"
    run("export", tmp_path / "history" / "step-000006", "--to", "dcp", "--for", "torchtitan", "--out", back)
    theirs = titan(tmp_path / "back", after, fused=not fused, data=[[2, 0]], excluded=["dataloader"])
    assert sorted(ours) == [4, 5, 6]
    assert sorted(theirs) == [7, 8, 9]
    for step, loss in {**ours, **theirs}.items():
        assert math.isclose(loss, alone[step], rel_tol=1e-5), (step, loss, alone[step])


def test_trainer_with_muon_resumes_from_an_export_and_from_what_the_runner_trained(tmp_path: Path) -> None:
    data, muon = [[0, 12], [1, 12], [2, 0]], {**FSDP, "fused": False, "muon": True}
    alone = titan(tmp_path / "alone", muon, data=data)
    source = tmp_path / "alone" / "checkpoint" / "step-3"
    (source / "config.json").write_text(json.dumps(LLAMA))
    run("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "dcp", "--for", "torchtitan",
        "--out", tmp_path / "again" / "checkpoint" / "step-3")  # fmt: skip
    again = titan(tmp_path / "again", muon, data=data[1:], excluded=["dataloader"])
    assert again == {step: loss for step, loss in alone.items() if step > 3}

    args = (*SCHEDULE, *BATCH, "--resume", "auto", "--steps", "6", "--checkpoint", tmp_path / "history")
    run_jobs(2, [job(tmp_path / "packed", tmp_path / "log", *args)])
    ours = {line["step"]: line["loss"] for line in lines_of(tmp_path / "log") if "loss" in line}
    back = tmp_path / "back" / "checkpoint" / "step-6"
    run("export", tmp_path / "history" / "step-000006", "--to", "dcp", "--for", "torchtitan", "--out", back)
    theirs = titan(tmp_path / "back", muon, data=data[2:], excluded=["dataloader"])
    assert (sorted(ours), sorted(theirs)) == ([4, 5, 6], [7, 8, 9])
    for step, loss in {**ours, **theirs}.items():
        assert math.isclose(loss, alone[step], rel_tol=1e-5), (step, loss, alone[step])


@pytest.mark.parametrize(("degrees", "layout"), [(FSDP, "pp=1"), (PP, "pp=2")], ids=["fsdp", "pp"])
def test_torchtitan_starts_from_a_packed_folder(degrees: Mapping[str, int], layout: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    model.save_pretrained(tmp_path / "model")
    run("pack", tmp_path / "model", "--layout", layout, "--out", tmp_path / "packed")
    losses = titan(tmp_path / "run", degrees, fused=True, data=[[5, 0]], start=str(tmp_path / "packed"), steps=1)
    data, batch = DataOptions(sources=("synthetic",), seed=5), BatchOptions(seq_len=16, global_batch=4, microbatch=1)
    first = next(read_batches(data, batch, folder=Path(), vocab_size=LLAMA["vocab_size"]))
    with torch.no_grad():
        logits = model(first.tokens, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), first.labels.flatten())
    assert math.isclose(losses[1], expected.item(), rel_tol=1e-5)
