"""Runs that freeze parameters: frozen bytes stay, and a run resumes on another layout as if it had not stopped."""

from __future__ import annotations

import json
import shlex
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, MiniMaxM2Config, MiniMaxM2ForCausalLM

from reshard.formats.open import open_source
from tests.builders import EMBEDDING, HEAD, pack, refusal, reshard, run
from tests.fast.runner.tiny import save_model
from tests.fast.trained import read_moments, write_moments
from tests.process.local_jobs import forked_runner
from tests.process.runner.training_jobs import job, run_jobs

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
    slices = tmp_path / "slices"
    tensor = ("--steps", "4", "--tp", "2", "--resume", checkpoints / "step-000002", "--checkpoint", slices)
    shared = train(packed, tmp_path / "d", *lora, *tensor, launch=("--nproc-per-node", "4"))
    assert shared == pytest.approx(straight[2:], rel=5e-6)
    assert [*first, *more] == pytest.approx(straight, rel=1e-6)
    run("verify", checkpoints / "step-000004")
    for healthy in (checkpoints, slices):
        run("check", healthy / "step-000004", "--values")
    damaged = shutil.copytree(checkpoints / "step-000004", tmp_path / "damaged")
    moments = read_moments(damaged, 0, "exp_avg")
    name, moment = next(iter(moments.items()))
    moments[name] = replace(moment, data=struct.pack("<f", float("nan")) + moment.data[4:])
    write_moments(damaged, 0, "exp_avg", moments)
    (problem,) = reshard("check", damaged, "--values", "--json").json["problems"]
    assert (problem["code"], repr(name) in problem["where"]) == ("check.not-finite", True)
    assert refusal("pack", checkpoints / "step-000004", "--layout", "pp=1", "--out", tmp_path / "no").found[:2] == (
        3, "manifest.adapters-alone",
    )  # fmt: skip
    run("merge", packed, tmp_path / "adapter", "--out", tmp_path / "merged")
    run("merge", alone, tmp_path / "adapter", "--out", tmp_path / "merged-alone")
    assert refusal("merge", tmp_path / "merged", checkpoints / "step-000004", "--out", tmp_path / "no").found[:2] == (
        3, "source.bad-adapter",
    )  # fmt: skip


def test_adapters_of_a_trained_checkpoint_are_merged_into_its_weights_and_not_resumed_on_others(
    packed_alone: Path, tmp_path: Path
) -> None:
    run("export", packed_alone, "--to", "hf", "--out", tmp_path / "source")
    source = load_file(tmp_path / "source" / "model.safetensors")
    base, ranks = tmp_path / "full" / "step-000001", ("--nproc-per-node", "2")  # which write slices
    train(packed_alone, tmp_path / "a", "--steps", "1", "--dp-shard", "2", "--checkpoint", base.parent, launch=ranks)
    lora, name = ("--lora-rank", "4", "--lr", "1e-2"), "model.layers.0.self_attn.q_proj"
    for number, (launched, *flags) in enumerate(((packed_alone, "--resume", base), (base,))):
        saved, history = tmp_path / f"adapter-{number}", tmp_path / f"checkpoints-{number}"
        ended = forked_runner(
            "launch", launched, "--log-dir", tmp_path / f"log-{number}", "--", *FLAGS, *lora, *flags,
            "--resume-weights-only", "--steps", "2", "--checkpoint", history, "--save", saved,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        for command in ended.stdout.splitlines()[-1].removeprefix("next: ").split(" && "):
            run(*shlex.split(command)[1:])
        trained, merged = (load_file(f"{saved}-{kind}/model.safetensors") for kind in ("base", "merged"))
        adapter = load_file(saved / "adapter_model.safetensors")
        a, b = (adapter[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        assert torch.allclose(merged[f"{name}.weight"], trained[f"{name}.weight"] + b @ a, atol=1e-6)
        assert torch.equal(merged[EMBEDDING], trained[EMBEDDING])
        assert not torch.equal(merged[EMBEDDING], source[EMBEDDING])
        for wrong in (tmp_path / "source", packed_alone):
            refused = refusal("merge", wrong, saved, "--out", tmp_path / "no")
            assert refused.found == (3, "source.other-adapter", str(saved))
    resumed = (*lora, "--resume", "auto", "--steps", "3", "--checkpoint", tmp_path / "checkpoints-0")
    ended = forked_runner("launch", packed_alone, "--log-dir", tmp_path / "b", "--", *FLAGS, *resumed)
    assert ended.returncode == 3, ended.stderr
    assert "[resume.other-base]" in ended.stderr
    assert len(train(base, tmp_path / "c", *resumed)) == 1
    more = ("--lora-from", tmp_path / "adapter-0", "--steps", "1")
    ended = forked_runner("launch", packed_alone, "--log-dir", tmp_path / "d", "--", *FLAGS, *more)
    assert ended.returncode == 3, ended.stderr
    assert "[source.other-adapter]" in ended.stderr
    assert len(train(base, tmp_path / "e", *more, "--resume-weights-only")) == 1


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


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return {fqn: tensor for file in folder.glob("*.safetensors") for fqn, tensor in load_file(file).items()}


def check_frozen(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that frozen tensors have the dtype and the bits of the source, and that others were trained."""
    assert {fqn.replace(HEAD, EMBEDDING) for fqn in found} == expected.keys()
    for fqn, tensor in found.items():
        whole = expected[fqn.replace(HEAD, EMBEDDING)]
        is_same = tensor.dtype == whole.dtype and torch.equal(tensor, whole)
        assert is_same != ("layers.1." in fqn), (fqn, tensor.dtype)


MIXED = ("--dtype", "bf16", "--master-dtype", "fp32")
# The dtype of the source, those of the run, and how two ranks share one stage.
CASES: Mapping[str, tuple[torch.dtype, tuple[str, ...], tuple[str, ...]]] = {
    "float32-mixed-fsdp": (torch.float32, MIXED, ("--dp-shard", "2")),
    "float32-bf16-tp": (torch.float32, ("--dtype", "bf16", "--master-dtype", "bf16"), ("--tp", "2")),
    "float32-bf16-fsdp": (torch.float32, ("--dtype", "bf16", "--master-dtype", "bf16"), ("--dp-shard", "2")),
    "float16-mixed-tp": (torch.float16, MIXED, ("--tp", "2")),
    "bfloat16-fp32-fsdp": (torch.bfloat16, ("--dtype", "fp32"), ("--dp-shard", "2")),
}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two stages, resume on one, and resume there on two ranks that share it."""
    place = tmp_path_factory.mktemp("frozen")
    for dtype in {dtype for dtype, _, _ in CASES.values()}:
        source = place / str(dtype)
        save_model(place / "float32", tie_word_embeddings=True).to(dtype).save_pretrained(source)
        for layout in ("pp=2", "pp=1"):
            pack(source, place / f"{dtype}-{layout}", layout)

    def jobs(layout: str, step: int, *, resumes: bool, shares: bool = False) -> Iterator[dict[str, Any]]:
        for name, (dtype, compute, shared) in CASES.items():
            flags = ("--train-only", r"layers\.1\.", "--lr", "1e-1", *compute, "--steps", step, *FLAGS[:-2])
            checkpoints = ("--checkpoint", place / name / "checkpoints", *(("--resume", "auto") if resumes else ()))
            saved = ("--save", place / name / f"saved-{step}", *(shared if shares else ()))
            yield job(place / f"{dtype}-{layout}", place / name / f"log-{step}", *flags, *checkpoints, *saved)

    run_jobs(2, list(jobs("pp=2", 2, resumes=False)), 280)
    run_jobs(1, list(jobs("pp=1", 3, resumes=True)), 280)
    run_jobs(2, list(jobs("pp=1", 4, resumes=True, shares=True)), 280)
    return place


@pytest.mark.parametrize("name", CASES)
def test_frozen_weights_have_the_bits_of_the_source_whatever_dtype_the_run_computes_in(name: str, frozen: Path) -> None:
    expected = load_file(frozen / str(CASES[name][0]) / "model.safetensors")
    place, newest = frozen / name, frozen / name / "checkpoints" / "step-000004"
    for folder in (place / "checkpoints" / "step-000002", *(place / f"saved-{step}" for step in (2, 3, 4))):
        check_frozen(stored_in(folder), expected)
    for trained in (place / "saved-2", place / "saved-3", newest):
        run("export", trained, "--to", "hf", "--out", place / "exported" / trained.name)
        check_frozen(load_file(place / "exported" / trained.name / "model.safetensors"), expected)
    model = LlamaForCausalLM.from_pretrained(place / "exported" / newest.name, dtype="auto")
    check_frozen(model.state_dict(), expected)


BIAS = "e_score_correction_bias"


@pytest.mark.parametrize("compute", [MIXED, CASES["float32-bf16-tp"][1]], ids=["mixed", "bf16"])
def test_biases_of_routers_that_are_computed_with_in_bfloat16_keep_their_bytes(
    compute: tuple[str, ...], tmp_path: Path
) -> None:
    """As transformers has them: buffers that a model in bfloat16 rounds, and that its files may have in float32."""
    torch.manual_seed(0)
    config = MiniMaxM2Config(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64, vocab_size=320,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = MiniMaxM2ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            torch.nn.init.normal_(buffer)
    model.save_pretrained(tmp_path / "source")
    source = stored_in(tmp_path / "source")
    biases = {fqn: tensor for fqn, tensor in source.items() if fqn.endswith(BIAS)}
    assert [bias.dtype for bias in biases.values()] == [torch.float32] * 2
    assert not any(torch.equal(bias, bias.bfloat16().float()) for bias in biases.values())
    two = pack(tmp_path / "source", tmp_path / "pp=2", "pp=2", "--virtual")
    alone = pack(tmp_path / "source", tmp_path / "pp=1", "pp=1")
    flags = (*compute, "--lr", "1e-2", "--checkpoint", tmp_path / "checkpoints", "--resume", "auto")
    straight = train(alone, tmp_path / "a", *compute, "--lr", "1e-2", "--steps", "3")
    first = train(two, tmp_path / "b", *flags, "--steps", "2", "--save", tmp_path / "saved-2")
    shared = ("--dp-shard", "2") if compute == MIXED else ("--tp", "2")
    more = train(alone, tmp_path / "c", *flags, "--steps", "3", "--save", tmp_path / "saved-3", *shared,
                 launch=("--nproc-per-node", "2"))  # fmt: skip
    assert [*first, *more] == pytest.approx(straight, rel=2e-2)
    run("export", tmp_path / "checkpoints" / "step-000003", "--to", "hf", "--out", tmp_path / "exported")
    for name in ("checkpoints/step-000002", "saved-2", "saved-3", "exported"):
        weights = stored_in(tmp_path / name)
        assert weights.keys() == source.keys()
        for fqn, tensor in weights.items():
            is_same = tensor.dtype == source[fqn].dtype and torch.equal(tensor, source[fqn])
            assert is_same == (fqn in biases), (name, fqn, tensor.dtype)
