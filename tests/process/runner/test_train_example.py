"""`examples/train.py` on two ranks: its losses are those of transformers in one process, and it saves its modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import reshard
from tests.builders import reshard as command
from tests.fast.runner.tiny import EMBEDDING, HEAD, SIZES, load_model, save_model
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said
from tests.process.torchrun import launch

STEPS, MICROBATCHES, BATCH, SEQ_LEN = 3, 4, 8, 32


def expected_losses(model: Path) -> list[float]:
    """Train the whole model in this process as the example says that it does."""
    module, losses = load_model(model).train(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(SIZES["vocab_size"], (BATCH, SEQ_LEN + 1), generator=generator)
        optimizer.zero_grad()
        logits = module(tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_plain_loop_trains_tied_stages_and_saves_what_its_modules_have(tmp_path: Path) -> None:
    save_model(tmp_path / "model", tie_word_embeddings=True)
    packed, out = tmp_path / "pp2", tmp_path / "history" / f"step-{STEPS:06d}"
    reshard.pack(tmp_path / "model", packed, "pp=2")
    reshard.pack(tmp_path / "model", tmp_path / "pp1", "pp=1")
    ranks = launch(2, "runner/save_stages_worker.py", tmp_path, str(STEPS))
    printed = "".join(ranks)
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(expected_losses(tmp_path / "model"), abs=2e-5)

    assert command("verify", out).code == 0
    assert command("export", out, "--to", "hf", "--out", tmp_path / "hf").code == 0
    exported = {
        name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    weights, moments = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    assert torch.equal(weights[0][EMBEDDING], weights[1][HEAD])
    expected = {name: tensor for part in weights for name, tensor in part.items() if name != HEAD}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    for stage, expected in enumerate(moments):
        (file,) = (out / f"stage-{stage:03d}" / "exp_avg").iterdir()
        saved = load_file(file)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in expected)

    flags = ("--data", "synthetic", "--seq-len", SEQ_LEN, "--global-batch", 8, "--device", "cpu")
    run_jobs(1, [job(tmp_path / "pp1", tmp_path / "log", *flags, "--resume", out, "--steps", STEPS + 1)])
    assert f"resuming from {out} at step {STEPS} ({STEPS * BATCH * SEQ_LEN:,} tokens)" in said(tmp_path / "log")
    (step,) = (line for line in lines_of(tmp_path / "log") if "loss" in line)
    assert (step["step"], step["lr"]) == (STEPS + 1, 1e-3)

    # What differs on one rank is refused on both, and nothing is written.
    assert re.findall(r"refused (\S+)", ranks[0]) == re.findall(r"refused (\S+)", ranks[1]) == [
        "rank.tied-weights-differ", "model.unexpected-parameter", "checkpoint.unsupported-optimizer",
    ]  # fmt: skip
    assert not (tmp_path / "no").exists()

    # Two ranks of FSDP each write their slices; merged, they are the model that was loaded.
    assert {shard.path for shard in reshard.open(tmp_path / "sliced").manifest.shards} == {
        f"stage-000/model-{number:05d}-of-00002.safetensors" for number in (1, 2)
    }
    assert command("verify", tmp_path / "sliced", "--against", tmp_path / "model").code == 0
