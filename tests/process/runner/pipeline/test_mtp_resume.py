"""Training with MTP layers through the commands' own flags, resumed at other degrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import pack
from tests.process.runner.pipeline.mtp_oracle import FLAGS, config_of, random_weights
from tests.process.runner.training_jobs import job, lines_of, run_jobs, said

pytestmark = pytest.mark.timeout(300)

BORROWS = "Ettttm|L"  # the norm, of another rank
LAYOUTS = ("EttttmL", "Ettt|tmL", "Et|ttt|m|L")  # the third stage of the last borrows the norm
STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**config_of(1), "dtype": "float32"}))
    weights = {name: tensor.clone() for name, tensor in random_weights(1).items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    for layout in (*LAYOUTS, BORROWS):
        pack(source, folder / layout, layout)
    return folder


def train(place: Path, name: str, layout: str, steps: int, *flags: object) -> dict[str, Any]:
    words = ("--microbatch", 1, "--steps", steps, "--device", "cpu", "--no-self-check")
    return job(place / layout, place / f"log-{name}", *FLAGS, *words, *flags)


def losses(place: Path, name: str) -> list[tuple[float, float]]:
    lines = lines_of(place / f"log-{name}")
    return [(line["loss"], line["mtp_loss"]) for line in lines if "loss" in line]


def test_checkpoint_resumes_at_another_degree(place: Path) -> None:
    saved = ("--checkpoint", place / "history", "--resume", "auto")
    hops = [
        train(place, f"hop {number}", layout, number * STEPS // len(LAYOUTS), *saved)
        for number, layout in enumerate(LAYOUTS, 1)
    ]
    run_jobs(1, [train(place, "whole", LAYOUTS[0], STEPS), hops[0]])
    for layout, hop in zip(LAYOUTS[1:], hops[1:], strict=True):
        run_jobs(layout.count("|") + 1, [hop])
    resumed = [of_step for number in range(1, len(hops) + 1) for of_step in losses(place, f"hop {number}")]
    assert len(set(resumed)) == STEPS  # the weights move
    assert resumed == [pytest.approx(of_step, rel=1e-6) for of_step in losses(place, "whole")]


GROUPS = """
[[group]]
algorithm = "sgd"
patterns = ["model.embed_tokens.weight"%s]
[[group]]
algorithm = "adamw"
"""


def test_copies_of_a_weight_are_in_its_parameter_group(place: Path) -> None:
    for name, copy in (("apart", ""), ("together", ', "*.embed_tokens.weight"')):
        (place / f"{name}.toml").write_text(GROUPS % copy)
    flags = ("--checkpoint", place / "grouped", "--optimizer")
    run_jobs(1, [train(place, name, LAYOUTS[0], 1, *flags, place / f"{name}.toml") for name in ("apart", "together")])
    copy = "model.layers.4.embed_tokens.weight"
    assert f"error: options.optimizer-pattern at rank 0: --optimizer: {copy}\n" in said(place / "log-apart")
    pack(place / "grouped" / "step-000001", place / "packed again", "pp=1")


@pytest.mark.slow
def test_frozen_norm_is_lent_in_the_dtype_of_the_files(place: Path) -> None:
    flags = ("--dtype", "bf16", "--train-only", r"layers\.[14]\.", "--save")
    run_jobs(2, [train(place, "whole frozen", BORROWS, 2, *flags, place / "whole frozen")])
    run_jobs(4, [train(place, "sharded", BORROWS, 2, *flags, place / "sharded", "--dp-shard", 2)])
    assert losses(place, "sharded") == [pytest.approx(of_step, rel=1e-2) for of_step in losses(place, "whole frozen")]
    saved = {
        fqn: tensor for file in (place / "sharded").glob("*.safetensors") for fqn, tensor in load_file(file).items()
    }
    norm = random_weights(1)["model.norm.weight"]
    assert saved["model.norm.weight"].dtype == norm.dtype
    assert torch.equal(saved["model.norm.weight"], norm)


@pytest.mark.slow
def test_norm_that_its_own_rank_does_not_use_is_reduced_in_mixed_precision(place: Path) -> None:
    flags = ("--dtype", "bf16", "--master-dtype", "fp32")
    run_jobs(2, [train(place, "mixed", BORROWS, 3, *flags)])
    run_jobs(4, [train(place, "mixed, sharded", BORROWS, 3, *flags, "--dp-shard", 2)])
    assert losses(place, "mixed, sharded") == [pytest.approx(of_step, rel=1e-2) for of_step in losses(place, "mixed")]
