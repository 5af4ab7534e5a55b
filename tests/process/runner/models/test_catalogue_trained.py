"""Architectures of the catalogue, trained on two ranks, on one, and resumed on another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.builders import reshard
from tests.fast.manifests.models.catalogued import config_of, quiet, save_tiny
from tests.process.runner.training_jobs import job, lines_of, losses_of, run_jobs, said

# Tied, with parallel attention and a scaled head; experts in one tensor beside linear attention, and untied; keys,
# values and an input for each layer that are handed on beside the hidden state.
TRAINED: Mapping[str, Mapping[str, Any]] = {
    "Cohere2ForCausalLM": {},
    "Gemma4ForCausalLM": {"num_kv_shared_layers": 2},
    "Qwen3NextForCausalLM": {},
}
SHARED: Mapping[str, tuple[Any, ...]] = {
    "Cohere2ForCausalLM": ("--dp-shard", 2, "--no-self-check"),
    "Gemma4ForCausalLM": ("--dp-replicate", 2, "--no-self-check"),
    "Qwen3NextForCausalLM": ("--tp", 2),
}
RECOMPUTED = "Gemma4ForCausalLM"
FOUR = ("Cohere2ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM", "Qwen3NextForCausalLM")
SAVING = ("--checkpoint-every", 2, "--checkpoint")
FLAGS = ("--data", "synthetic", "--seq-len", 16, "--global-batch", 4, "--lr", 1e-3, "--steps", 3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == RECOMPUTED else pytest.mark.slow) for name in TRAINED]
)
def test_two_ranks_train_as_one_does_and_resume_on_it(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    pack(place, name, "pp=1", "pp=2", **TRAINED[name])
    runs: list[tuple[Any, ...]] = [
        ("pp=2", "two-log", *SAVING, "two"),
        ("pp=1", "shared-log", *SHARED[name], *SAVING, "shared"),
    ]
    runs += [("pp=2", "recomputed-log", "--ac", "full", "--no-self-check")] if name == RECOMPUTED else []
    run_all(tmp_path, 2, *({name: run} for run in runs))
    alone = ("pp=1", "one-log", "--no-self-check")  # runs on two ranks are checked
    resumed = ("pp=1", "resumed-log", "--no-self-check", "--resume", "shared/step-000002")
    run_all(tmp_path, 1, {name: alone}, {name: resumed})
    expected = losses_of(place / "one-log")
    assert losses_of(place / "two-log")[0] == pytest.approx(loss_before_training(place), rel=1e-6)
    for log in ("two-log", "shared-log"):
        assert losses_of(place / log) == pytest.approx(expected, rel=1e-5)
    assert ("to verify parts" in said(place / "shared-log")) == ("--dp-replicate" not in SHARED[name])
    assert losses_of(place / "resumed-log") == pytest.approx(expected[2:], rel=1e-5)
    assert ("--tp 2 as one process" in said(place / "shared-log")) == ("--tp" in SHARED[name])
    assert "self-check" in said(place / "two-log")
    exported = reshard("export", place / "two" / "step-000002", "--to", "hf", "--out", place / "hf", "--quiet")
    assert exported.code == 0, exported.err
    with quiet():
        trained, report = getattr(transformers, name).from_pretrained(place / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
    if name == RECOMPUTED:
        assert losses_of(place / "recomputed-log") == losses_of(place / "two-log")
        assert "self-check" not in said(place / "recomputed-log")


@pytest.mark.slow
def test_deepseek_v4_trains_with_wide_heads_and_its_table_of_experts(tmp_path: Path) -> None:
    place = tmp_path / "DeepseekV4ForCausalLM"
    with quiet():
        torch.manual_seed(0)
        config = config_of(place.name, head_dim=32, partial_rotary_factor=8 / 32)  # 512 and 64 of the real one
        model = transformers.DeepseekV4ForCausalLM(config)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint_like(buffer, config.n_routed_experts))
        model.save_pretrained(place / "source", max_shard_size="200KB")
    assert config.head_dim != config.qk_rope_head_dim
    for layout in ("pp=1", "pp=2"):
        packed = reshard("pack", place / "source", "--layout", layout, "--out", place / layout, "--quiet")
        assert packed.code == 0, packed.err
    saving = ("--max-norm", 0, *SAVING, "two")
    run_all(tmp_path, 2, {place.name: ("pp=2", "two-log", *saving)})
    run_all(tmp_path, 1, {place.name: ("pp=1", "resumed-log", "--resume", "two/step-000002")})
    assert "self-check" in said(place / "two-log")
    loss, gradients = gradients_before_training(place)
    first = next(line for line in lines_of(place / "two-log") if "loss" in line)
    assert first["loss"] == pytest.approx(loss, rel=1e-6)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert losses_of(place / "resumed-log") == pytest.approx(losses_of(place / "two-log")[2:], rel=1e-5)
    saved = load_all(place / "two" / "step-000002")
    tables = {name: tensor for name, tensor in load_all(place / "source").items() if name.endswith("tid2eid")}
    assert tables
    for name, table in tables.items():
        assert saved[name].dtype == torch.int64
        assert torch.equal(saved[name], table)


@pytest.mark.slow
def test_parameters_kept_in_float32_train_and_resume_beside_bfloat16_or_are_refused(tmp_path: Path) -> None:
    names, half, masters = ("Ernie4_5_MoeForCausalLM", "HunYuanMoEV1ForCausalLM"), ("--dtype", "bf16"), "--master-dtype"
    for name in names:
        pack(tmp_path / name, name, "pp=1", "pp=2")
    two = ("pp=2", "two-log", *half, *SAVING, "two")
    run_all(tmp_path, 2, dict.fromkeys(names, two))
    resumed = ("pp=1", "resumed-log", "--resume", "two/step-000002")
    mixed = ("pp=1", "mixed-log", *half, masters, "fp32", "--no-self-check")
    run_all(tmp_path, 1, dict.fromkeys(names, resumed), dict.fromkeys(names, mixed))
    shared = ("pp=1", "shared-log", *half, masters, "fp32", "--dp-shard", 2, "--ac", "full")
    run_all(tmp_path, 2, dict.fromkeys(names, shared))
    for name in names:
        place = tmp_path / name
        assert losses_of(place / "resumed-log") == pytest.approx(losses_of(place / "two-log")[2:], rel=1e-3)
        assert losses_of(place / "shared-log") == pytest.approx(losses_of(place / "mixed-log"), rel=1e-3)
        with quiet():
            whole = getattr(transformers, name).from_pretrained(place / "source", dtype=torch.bfloat16)
            whole.save_pretrained(place / "read")
        saved, read = load_all(place / "two" / "step-000002"), load_all(place / "read")
        assert {tensor.dtype for tensor in read.values()} == {torch.bfloat16, torch.float32}
        assert {fqn: saved[fqn].dtype for fqn in read} == {fqn: tensor.dtype for fqn, tensor in read.items()}
        refused = {name: ("pp=1", "refused-log", *half, "--dp-shard", 2, "--no-self-check")}
        run_all(tmp_path, 2, refused, error="options.catalogue-combination")


def test_gradients_of_parameters_kept_in_float32_are_summed_in_float32_over_replicas(tmp_path: Path) -> None:
    """AdamW's first moment after a step from zero is the gradient times 1 - 0.9."""
    place = tmp_path / "Ernie4_5_MoeForCausalLM"
    pack(place, place.name, "pp=1")
    saving = ("--max-norm", 0, "--steps", 1, "--beta1", 0.9, "--checkpoint", "two", "--no-self-check")
    run_all(tmp_path, 2, {place.name: ("pp=1", "two-log", "--dtype", "bf16", "--dp-replicate", 2, *saving)})
    moments = load_all(place / "two" / "step-000001" / "stage-000" / "exp_avg")
    expected = gradients_before_training(place, torch.bfloat16)[1]
    exact = {fqn: gradient for fqn, gradient in expected.items() if gradient.dtype == torch.float32}
    assert exact
    for fqn, gradient in exact.items():
        assert moments[fqn].dtype == torch.float32
        assert (10 * moments[fqn] - gradient).norm() <= 1e-5 * gradient.norm(), fqn


@pytest.mark.slow
def test_keys_of_a_rank_s_heads_are_handed_on_to_the_next_stage(tmp_path: Path) -> None:
    names = {name: TRAINED.get(name, {}) for name in ("Gemma4ForCausalLM", "GlmMoeDsaForCausalLM")}
    for name, changes in names.items():
        pack(tmp_path / name, name, "pp=1", "pp=2", **changes)
    run_all(tmp_path, 4, dict.fromkeys(names, ("pp=2", "tensor-log", "--tp", 2)))
    run_all(tmp_path, 1, dict.fromkeys(names, ("pp=1", "one-log")))
    for name, tolerance in zip(names, (2e-4, 2e-5), strict=True):  # float32 rounds Gemma 4's gradients by up to 4e-5
        expected = pytest.approx(losses_of(tmp_path / name / "one-log"), tolerance)
        assert losses_of(tmp_path / name / "tensor-log") == expected
        assert "--tp 2 as one process" in said(tmp_path / name / "tensor-log")


@pytest.mark.slow
def test_four_ranks_train_as_one_does(tmp_path: Path) -> None:
    for name in FOUR:
        pack(tmp_path / name, name, "pp=1", "pp=2", "pp=4")
    ways = (
        ("pp=2", "tensor-log", "--tp", 2),
        ("pp=1", "both-log", "--tp", 2, "--dp-shard", 2),
        ("pp=2", "shard-log", "--dp-shard", 2),
        ("pp=4", "v-log", "--schedule", "1F1B"),
    )
    run_all(tmp_path, 4, *(dict.fromkeys(FOUR, way) for way in ways))
    run_all(tmp_path, 1, dict.fromkeys(FOUR, ("pp=1", "one-log")))
    for name in FOUR:
        one = losses_of(tmp_path / name / "one-log")
        for _, log, *_ in ways:
            assert losses_of(tmp_path / name / log) == pytest.approx(one, rel=2e-5), (name, log)


def pack(place: Path, name: str, *layouts: str, **changes: Any) -> None:
    save_tiny(place / "source", name, **changes)
    for layout in layouts:
        packed = reshard("pack", place / "source", "--layout", layout, "--out", place / layout, "--quiet")
        assert packed.code == 0, packed.err


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loss_before_training(place: Path) -> float:
    return gradients_before_training(place)[0]


def gradients_before_training(place: Path, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of transformers' whole model on the first batch, a row at a time, and its gradients."""
    from runner.config.flags import parse_training
    from runner.data.sequences import read_batches

    options = parse_training([str(flag) for flag in FLAGS])
    with quiet():
        model = getattr(transformers, json.loads((place / "source" / "config.json").read_text())["architectures"][0])
        model = model.from_pretrained(place / "source", dtype=dtype)
    batch: Any = next(iter(read_batches(options.data, options.batch, folder=place, vocab_size=model.config.vocab_size)))
    loss = torch.zeros(())
    for tokens, labels in zip(batch.tokens.split(1), batch.labels.split(1), strict=True):
        logits = model(tokens, use_cache=False).logits.float().flatten(0, 1)
        of_row = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / batch.labels.numel()
        of_row.backward()
        loss += of_row.detach()
    named = model.named_parameters()
    return loss.item(), {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def run_all(tmp_path: Path, num_ranks: int, *runs: Mapping[str, tuple[Any, ...]], error: str = "") -> None:
    """Run jobs of architectures with one launch; all of them end well, or with `error`."""
    jobs, logs = [], []
    for name, (packed, log, *flags) in (run for each in runs for run in each.items()):
        place = tmp_path / name
        flags = [place / flag if str(flag).startswith(("two", "shared")) else flag for flag in flags]
        logs.append(place / log)
        jobs.append(job(place / packed, logs[-1], *FLAGS, *flags))
    run_jobs(num_ranks, jobs, timeout_s=280)
    for log in logs:
        assert ("error:" in said(log), error in said(log)) == (bool(error), True), said(log)
