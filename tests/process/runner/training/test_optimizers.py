"""Optimizers on real ranks: any degrees train as one process does, and a checkpoint hops between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.builders import pack, reshard
from tests.process.runner.training_jobs import job, losses_of, run_jobs

pytestmark = pytest.mark.timeout(600)

GROUPS = """
[[group]]
algorithm = "muon"
patterns = ["model.layers.*_proj.weight"]
[[group]]
algorithm = "tests.toy_optimizers.Signs"
patterns = ["model.embed_tokens.weight", "lm_head.weight"]
rate_factor = 0.1
elementwise = true
[[group]]
algorithm = "adafactor"
patterns = ["*norm.weight"]
clip = false
[[group]]
algorithm = "sgd"
weight_decay = 0.0
"""
# Muon computes in bfloat16: a gradient that differs in its last bit may round otherwise. The rate keeps that small.
RATE = ("--lr", "1e-4", "--ema", "0.9")
DEGREES: dict[str, tuple[int, str, tuple[object, ...]]] = {
    "pp=2": (2, "pp=2", ()),
    "shards": (2, "pp=1", ("--dp-shard", 2)),
    "experts": (2, "pp=1", ("--dp-shard", 2, "--ep", 2)),
    "tensor": (2, "pp=1", ("--tp", 2)),
    "pp=4": (4, "pp=4", ()),
    "virtual": (2, "pp=2,vpp=2", ()),
    "v": (2, "pp=2,style=v", ()),
    "replicas of shards": (4, "pp=1", ("--dp-replicate", 2, "--dp-shard", 2, "--ep", 2)),
    "both": (4, "pp=2", ("--dp-shard", 2)),
}
SAME_ORDER = ("pp=2", "pp=4", "virtual", "v")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a tiny mixture of experts for every layout."""
    folder = tmp_path_factory.mktemp("optimizers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder / "source")
    for layout in sorted({"pp=1", *(layout for _, layout, _ in DEGREES.values())}):
        pack(folder / "source", folder / layout, layout)
    (folder / "groups.toml").write_text(GROUPS)
    return folder


def train(place: Path, name: str, layout: str, steps: int, *flags: object, **more: Any) -> dict[str, Any]:
    words = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 8, "--steps", steps, "--device", "cpu",
             "--implementation", "transformers", "--no-self-check")  # fmt: skip
    return job(place / layout, place / f"log-{name}", *words, *flags, **more)


def groups(place: Path) -> tuple[object, ...]:
    return ("--optimizer", place / "groups.toml", *RATE)


def one_process(place: Path, steps: int = 20) -> list[float]:
    if not (place / "log-alone").exists():
        run_jobs(1, [train(place, "alone", "pp=1", steps, *groups(place))])
    return losses_of(place / "log-alone")


def check(place: Path, names: tuple[str, ...], steps: int) -> None:
    for num_ranks in sorted({DEGREES[name][0] for name in names}):
        chosen = [name for name in names if DEGREES[name][0] == num_ranks]
        run_jobs(num_ranks, [train(place, n, DEGREES[n][1], steps, *groups(place), *DEGREES[n][2]) for n in chosen])
    alone = one_process(place)[:steps]
    for name in names:
        losses = losses_of(place / f"log-{name}")
        assert len(losses) == steps
        limit = 0.0 if name in SAME_ORDER else 5e-6
        assert max(abs(loss - other) for loss, other in zip(losses, alone, strict=True)) <= limit, name


def test_shards_of_experts_train_as_one_process(place: Path) -> None:
    check(place, ("experts",), 4)


@pytest.mark.slow
def test_all_degrees_train_as_one_process(place: Path) -> None:
    check(place, tuple(name for name in DEGREES if name != "experts"), 20)


@pytest.mark.slow
def test_checkpoint_hops_between_degrees_and_keeps_the_losses(place: Path) -> None:
    saved = ("--checkpoint", place / "hops", "--resume", "auto")
    hops = ("experts", "pp=2", "tensor", "both")
    for number, name in enumerate(hops, 1):
        num_ranks, layout, flags = DEGREES[name]
        run_jobs(num_ranks, [train(place, f"hop {number}", layout, 3 * number, *groups(place), *flags, *saved)])
    losses = [loss for number in range(1, 5) for loss in losses_of(place / f"log-hop {number}")]
    alone = one_process(place)[:12]
    assert max(abs(loss - other) for loss, other in zip(losses, alone, strict=True)) <= 5e-6
    newest = place / "hops" / "step-000012"
    assert reshard("verify", newest).code == 0
    again = pack(newest, place / "resharded", "pp=4")
    assert reshard("diff", newest, again).code == 0
