"""Architectures of the catalogue, trained on two ranks, on one, and resumed on another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.builders import reshard
from tests.fast.models.catalogued import quiet, save_tiny
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# Tied, with parallel attention and a scaled head; experts in one tensor beside linear attention, and untied; keys,
# values and an input for each layer that are handed on beside the hidden state.
TRAINED: Mapping[str, Mapping[str, Any]] = {
    "Cohere2ForCausalLM": {},
    "Gemma4ForCausalLM": {"num_kv_shared_layers": 2},
    "Qwen3NextForCausalLM": {},
}
SHARED: Mapping[str, tuple[Any, ...]] = {
    "Cohere2ForCausalLM": ("--dp-shard", 2),
    "Gemma4ForCausalLM": ("--dp-replicate", 2),
    "Qwen3NextForCausalLM": ("--tp", 2),
}
FOUR = ("Cohere2ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM", "Qwen3NextForCausalLM")
SAVING = ("--checkpoint-every", 2, "--checkpoint")
FLAGS = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 4, "--lr", 1e-3, "--steps", 3)


def test_two_ranks_train_as_one_does_and_resume_on_it(tmp_path: Path) -> None:
    for name, changes in TRAINED.items():
        pack(tmp_path / name, name, "pp=1", "pp=2", **changes)
    run_all(tmp_path, 2, dict.fromkeys(TRAINED, ("pp=2", "two-log", *SAVING, "two")))
    run_all(tmp_path, 2, dict.fromkeys(TRAINED, ("pp=2", "recomputed-log", "--ac", "full", "--no-self-check")))
    run_all(tmp_path, 2, {name: ("pp=1", "shared-log", *SHARED[name], *SAVING, "shared") for name in TRAINED})
    run_all(tmp_path, 1, dict.fromkeys(TRAINED, ("pp=1", "one-log")))
    run_all(tmp_path, 1, dict.fromkeys(TRAINED, ("pp=1", "resumed-log", "--resume", "shared/step-000002")))
    for name in TRAINED:
        place = tmp_path / name
        two, one, resumed = (losses_of(place / log) for log in ("two-log", "one-log", "resumed-log"))
        assert two[0] == pytest.approx(loss_before_training(place), rel=1e-6)
        assert two == pytest.approx(one, rel=1e-5)
        assert losses_of(place / "shared-log") == pytest.approx(one, rel=1e-5)
        has_parts = "--dp-replicate" not in SHARED[name]
        assert ("to verify parts" in (place / "shared-log.txt").read_text()) == has_parts
        assert resumed == pytest.approx(one[2:], rel=1e-5)
        assert losses_of(place / "recomputed-log") == two
        assert ("on 2 tensor-parallel ranks" in (place / "shared-log.txt").read_text()) == ("--tp" in SHARED[name])
        checked = ["self-check" in (place / f"{log}.txt").read_text() for log in ("two-log", "recomputed-log")]
        assert checked == [True, False]
        exported = reshard("export", place / "two" / "step-000002", "--to", "hf", "--out", place / "hf", "--quiet")
        assert exported.code == 0, exported.err
        with quiet():
            trained, report = getattr(transformers, name).from_pretrained(place / "hf", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert all(parameter.isfinite().all() for parameter in trained.parameters())


@pytest.mark.slow
def test_tensor_parallel_ranks_that_would_draw_other_numbers_end_before_the_first_step(tmp_path: Path) -> None:
    name = "GraniteForCausalLM"  # a rank's heads are its own: in Olmo3 each rank has all
    pack(tmp_path / name, name, "pp=1", attention_dropout=0.1)
    run_all(tmp_path, 2, {name: ("pp=1", "refused-log", "--tp", 2)}, error="model.self-check-failed at rank 0: --tp")
    assert not (tmp_path / name / "refused-log" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_four_ranks_train_as_one_does(tmp_path: Path) -> None:
    for name in FOUR:
        pack(tmp_path / name, name, "pp=1", "pp=2", "pp=4")
    for log, layout, flags in (
        ("tensor-log", "pp=2", ("--tp", 2)),
        ("both-log", "pp=1", ("--tp", 2, "--dp-shard", 2)),
        ("shard-log", "pp=2", ("--dp-shard", 2)),
        ("v-log", "pp=4", ("--schedule", "1F1B")),
    ):
        run_all(tmp_path, 4, dict.fromkeys(FOUR, (layout, log, *flags)))
    run_all(tmp_path, 1, dict.fromkeys(FOUR, ("pp=1", "one-log")))
    for name in FOUR:
        one = losses_of(tmp_path / name / "one-log")
        for log in ("tensor-log", "both-log", "shard-log", "v-log"):
            assert losses_of(tmp_path / name / log) == pytest.approx(one, rel=2e-5), (name, log)


def pack(place: Path, name: str, *layouts: str, **changes: Any) -> None:
    save_tiny(place / "source", name, **changes)
    for layout in layouts:
        packed = reshard("pack", place / "source", "--layout", layout, "--out", place / layout, "--quiet")
        assert packed.code == 0, packed.err


def loss_before_training(place: Path) -> float:
    """Return the loss of transformers' whole model on the first batch."""
    from runner.config.flags import parse_training
    from runner.data.sequences import read_batches

    options = parse_training([str(flag) for flag in FLAGS])
    with quiet():
        model = getattr(transformers, json.loads((place / "source" / "config.json").read_text())["architectures"][0])
        model = model.from_pretrained(place / "source")
    batch: Any = next(iter(read_batches(options.data, options.batch, folder=place, vocab_size=model.config.vocab_size)))
    with torch.no_grad():
        logits = model(batch.tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()


def run_all(tmp_path: Path, num_ranks: int, runs: dict[str, tuple[Any, ...]], *, error: str = "") -> None:
    """Run a job of each architecture; all of them end well, or with `error`."""
    jobs = []
    for name, (packed, log, *more) in runs.items():
        place = tmp_path / name
        more = [place / arg if str(arg).startswith(("two", "shared")) else arg for arg in more]
        args = [str(arg) for arg in (*FLAGS, "--log-dir", place / log, *more)]
        jobs.append({"root": str(place / packed), "args": args, "log": str(place / f"{log}.txt")})
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    launch(num_ranks, "resume_worker.py", path)
    for job in jobs:
        said = Path(job["log"]).read_text()
        assert ("error:" in said, error in said) == (bool(error), True), said


def losses_of(log: Path) -> list[float]:
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
