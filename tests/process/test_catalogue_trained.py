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
FLAGS = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 4, "--lr", 1e-3, "--steps", 3)


def test_two_ranks_train_as_one_does_and_resume_on_it(tmp_path: Path) -> None:
    for name, changes in TRAINED.items():
        save_tiny(tmp_path / name / "source", name, **changes)
        for degree in (1, 2):
            packed = reshard("pack", tmp_path / name / "source", "--layout", f"pp={degree}",
                             "--out", tmp_path / name / f"pp{degree}", "--quiet")  # fmt: skip
            assert packed.code == 0, packed.err
    checkpoint = ("--checkpoint", "two", "--checkpoint-every", 2)
    run_all(tmp_path, 2, dict.fromkeys(TRAINED, ("pp2", "two-log", *checkpoint)))
    run_all(tmp_path, 2, dict.fromkeys(TRAINED, ("pp2", "recomputed-log", "--ac", "full", "--no-self-check")))
    run_all(tmp_path, 2, dict.fromkeys(TRAINED, ("pp1", "replicas-log", "--dp-replicate", "2")))
    run_all(tmp_path, 1, dict.fromkeys(TRAINED, ("pp1", "one-log")))
    run_all(tmp_path, 1, dict.fromkeys(TRAINED, ("pp1", "resumed-log", "--resume", "two/step-000002")))
    for name in TRAINED:
        place = tmp_path / name
        two, one, resumed = (losses_of(place / log) for log in ("two-log", "one-log", "resumed-log"))
        assert two[0] == pytest.approx(loss_before_training(place), rel=1e-6)
        assert two == pytest.approx(one, rel=1e-5)
        assert resumed == pytest.approx(one[2:], rel=1e-5)
        assert losses_of(place / "recomputed-log") == two
        checked = ["self-check" in (place / f"{log}.txt").read_text() for log in ("two-log", "recomputed-log")]
        assert checked == [True, False]
        assert losses_of(place / "replicas-log") == pytest.approx(one, rel=1e-5)
        exported = reshard("export", place / "two" / "step-000002", "--to", "hf", "--out", place / "hf", "--quiet")
        assert exported.code == 0, exported.err
        with quiet():
            trained, report = getattr(transformers, name).from_pretrained(place / "hf", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert all(parameter.isfinite().all() for parameter in trained.parameters())


@pytest.mark.slow
def test_an_auxiliary_loss_that_stages_would_leave_out_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    name = "BambaForCausalLM"
    save_tiny(tmp_path / name / "source", name, z_loss_coefficient=0.1)
    packed = reshard(
        "pack", tmp_path / name / "source", "--layout", "pp=2", "--out", tmp_path / name / "pp2", "--quiet"
    )
    assert packed.code == 0, packed.err
    run_all(tmp_path, 2, {name: ("pp2", "refused-log")}, error="model.self-check-failed at rank 0: config.json")
    assert not (tmp_path / name / "refused-log" / "metrics.jsonl").exists()
    run_all(tmp_path, 2, {name: ("pp2", "unchecked-log", "--no-self-check")})
    assert losses_of(tmp_path / name / "unchecked-log")[0] == pytest.approx(
        loss_before_training(tmp_path / name), rel=1e-6
    )


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
        more = [place / arg if str(arg).startswith("two") else arg for arg in more]
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
