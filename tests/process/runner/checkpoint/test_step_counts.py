"""Experts that no token reaches take no step, as in torch, and a resumed run counts as one that was not interrupted."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from manifests.trained import STEPS_NAME, encode_steps
from runner.config.flags import parse_training
from runner.data.sequences import read_batches
from tests.builders import pack, run
from tests.fast.manifests.models.built import build, read_config
from tests.fast.reshard.forged import change_manifest, digest
from tests.process.runner.checkpoint.test_resume import digests_in
from tests.process.runner.models.test_own_models import imported
from tests.process.runner.training_jobs import job, losses_of, run_jobs, said

MODEL = """\
import torch
from torch import nn

import runner


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 6)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, hidden):
        weights = self.router(hidden).softmax(-1)
        chosen, output = weights.argmax(-1), hidden
        for number in chosen.unique().tolist():
            here = (chosen == number)[..., None]
            output = output + here * weights[..., number : number + 1] * self.experts[number](hidden)
        return output


class Sparse(nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.embed = nn.Embedding(64, 16) if "embed" in modules else None
        self.layers = nn.ModuleDict({str(n): Layer() for n in range(2) if f"layers.{n}" in modules})
        self.head = nn.Linear(16, 64, bias=False) if "head" in modules else None

    def forward(self, hidden):
        for module in (self.embed, *self.layers.values(), self.head):
            hidden = hidden if module is None else module(hidden)
        return hidden


def family(request):
    return runner.NamedFamily(request, Sparse)
"""
DESCRIPTION = 'inputs = ["embed"]\nlayers = "layers"\noutputs = ["head"]\ncount = "depth"\nwidth = "dim"\n'
CONFIG = {"architectures": ["SparseDecoder"], "depth": 2, "dim": 16, "vocab_size": 64}
STEPS, MIDDLE, LR, DECAY, EPS = 6, 3, 1e-2, 0.1, 1e-3
FLAGS = (
    "--data", "synthetic", "--seq-len", "3", "--global-batch", "2", "--steps", str(STEPS), "--lr", str(LR),
    "--weight-decay", str(DECAY), "--eps", str(EPS), "--max-norm", "0", "--no-self-check",
)  # fmt: skip

MIXED = ("--dtype", "bf16", "--master-dtype", "fp32")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps, and resume after three on the same ranks, on another number, and after repacking."""
    place = tmp_path_factory.mktemp("counts")
    (place / "sparse_model.py").write_text(MODEL)
    info = place / "sparse_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sparse_model\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[runner.families]\nSparseDecoder = sparse_model:family\n")
    source = place / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    save_file(new_model(place).state_dict(), source / "model.safetensors")
    (place / "model.toml").write_text(DESCRIPTION)
    for layout in ("pp=1", "pp=2"):
        run("pack", source, "--layout", layout, "--model", place / "model.toml", "--out", place / layout)
    middle = checkpoint(place, "whole", MIDDLE)
    run_jobs(2, [
        training(place, "whole", place / "pp=2", "--checkpoint-every", str(MIDDLE)),
        training(place, "again", place / "pp=2", "--resume", middle),
        *(training(place, name, place / "pp=1", *MIXED, f"--dp-{name}", "2") for name in ("replicate", "shard")),
    ])  # fmt: skip
    run("pack", middle, "--layout", "pp=1", "--out", place / "repacked")
    run_jobs(1, [
        training(place, "across", place / "pp=1", "--resume", middle),
        training(place, "repacked-on", place / "repacked", "--resume", "auto"),
    ])  # fmt: skip
    return place


def training(place: Path, name: str, launched: Path, *flags: str | Path) -> dict[str, Any]:
    return job(launched, place / name, *FLAGS, "--checkpoint", place / name / "checkpoints", *flags, path=place)


def new_model(place: Path) -> Any:
    torch.manual_seed(0)
    return imported(place / "sparse_model.py").Sparse(("embed", "layers.0", "layers.1", "head"))


def checkpoint(place: Path, name: str, step: int = STEPS) -> Path:
    return place / name / "checkpoints" / f"step-{step:06d}"


def counts_in(folder: Path) -> dict[str, int]:
    counts: dict[str, int] = json.loads((folder / STEPS_NAME).read_text())["steps"]
    return counts


def train_outside(place: Path) -> tuple[Any, torch.optim.AdamW]:
    """Train the whole model by torch alone, on the batches of the runs."""
    options, model = parse_training(list(FLAGS)), new_model(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY)
    batches = read_batches(options.data, options.batch, folder=place, vocab_size=64)
    for batch in islice(batches, STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten()))
        optimizer.step()
    return model, optimizer


def test_checkpoint_lists_the_steps_that_torch_counts(place: Path) -> None:
    model, optimizer = train_outside(place)
    steps = {name: int(optimizer.state[weight].get("step", 0)) for name, weight in model.named_parameters()}
    expected = {name: count for name, count in steps.items() if count != STEPS}
    assert len(set(expected.values())) > 1, "experts differ"
    assert counts_in(checkpoint(place, "whole")) == expected
    run("export", checkpoint(place, "whole"), "--to", "hf", "--out", place / "exported")
    assert not (place / "exported" / STEPS_NAME).exists()
    trained = load_file(place / "exported" / "model.safetensors")
    for name, weight in model.named_parameters():
        torch.testing.assert_close(trained[name], weight.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["again", "across", "repacked-on"])
def test_resumed_run_ends_bitwise_as_one_that_was_not_interrupted(place: Path, name: str) -> None:
    whole, resumed = checkpoint(place, "whole"), checkpoint(place, name)
    late = counts_in(checkpoint(place, "whole", MIDDLE))
    assert any(0 < count < MIDDLE for count in late.values())
    assert counts_in(resumed) == counts_in(whole)
    assert digests_in(resumed) == digests_in(whole)


def test_experts_without_tokens_are_sharded_in_mixed_precision(place: Path) -> None:
    assert losses_of(place / "shard") == [pytest.approx(loss, rel=1e-3) for loss in losses_of(place / "replicate")]


def test_counts_of_experts_that_are_one_parameter_here_are_refused_if_they_differ(tmp_path: Path) -> None:
    """As another trainer has them, which has a module for each expert."""
    build(read_config("tiny-qwen3-moe")).save_pretrained(tmp_path / "source")
    packed = pack(tmp_path / "source", tmp_path / "packed", "pp=2")
    flags = (*FLAGS, "--checkpoint", tmp_path / "checkpoints", "--resume", "auto")
    run_jobs(2, [job(packed, tmp_path / "first", *flags, "--steps", 2)])
    saved = tmp_path / "checkpoints" / "step-000002"
    assert not (saved / STEPS_NAME).exists()
    text = encode_steps({"model.layers.3.mlp.experts.0.gate_proj.weight": 1})
    (saved / STEPS_NAME).write_bytes(text)
    record = {"path": STEPS_NAME, "nbytes": len(text), "digest": digest(text)}
    change_manifest(saved, lambda document: document["files"].append(record))
    run_jobs(2, [
        job(packed, tmp_path / "refused", *flags),
        job(packed, tmp_path / "anew", *FLAGS, "--steps", 1, "--resume", saved, "--resume-weights-only"),
    ])  # fmt: skip
    assert f"error: resume.other-optimizer at rank 1: {STEPS_NAME}: " in said(tmp_path / "refused")
    assert len(losses_of(tmp_path / "anew")) == 1
