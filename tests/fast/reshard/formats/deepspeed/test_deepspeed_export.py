"""Exports for DeepSpeed are what DeepSpeed itself wrote of the same model; torch's reader is the oracle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, LlamaConfig, Qwen3Config

from tests.builders import EMBEDDING, HEAD, pack, refusal, reshard, run
from tests.fast.reshard.formats.dcp.test_dcp_source import huggingface_state
from tests.fast.reshard.formats.deepspeed.test_deepspeed_source import (
    GOLDEN,
    MODEL_STATES,
    MOMENTS,
    STATE,
    STEPS,
    change,
    moments_of,
)
from tests.fast.trained import write_trained, write_trained_head

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=40),
}


def loaded(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    assert ours.keys() == theirs.keys(), where
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
        assert same, (where, name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama-deepspeed", "mpt"])
def test_layers_are_exported_as_deepspeed_wrote_them(name: str, tmp_path: Path) -> None:
    pack(GOLDEN / name, tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "deepspeed", "--out", tmp_path / "out")
    ours = tmp_path / "out" / (tmp_path / "out" / "latest").read_text()
    theirs = {int(path.name[6:8].rstrip("-")): path for path in (GOLDEN / name / STEPS[name]).glob("layer_*")}
    written = {path.name for path in ours.glob("layer_*")}
    if name == "gpt2":  # whose head computed with the first layer: other trainers' tied heads are layers of their own
        head = loaded(ours / "layer_04-model_00-model_states.pt")
        assert_alike(head, {"weight": load_file(GOLDEN / "gpt2.safetensors")["transformer.wte.weight"]}, "head")
        written.remove("layer_04-model_00-model_states.pt")
    assert written == {f"layer_{number:02d}-model_00-model_states.pt" for number in theirs}
    for number, path in theirs.items():
        assert_alike(loaded(ours / f"layer_{number:02d}-model_00-model_states.pt"), loaded(path), str(path))
    counts = loaded(ours / "mp_rank_00_model_states.pt")
    assert (counts["module"], counts["dp_world_size"], counts["global_steps"]) == (None, 1, 0)


def test_universal_checkpoint_is_exported_as_deepspeed_wrote_it(tmp_path: Path) -> None:
    theirs = GOLDEN / "gpt2-universal" / STEPS["gpt2-universal"]
    pack(GOLDEN / "gpt2-universal", tmp_path / "packed")
    done = run("export", tmp_path / "packed", "--to", "universal", "--for", "pipeline", "--out", tmp_path / "out")
    ours = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    assert ours.name == theirs.name
    # Otherwise DeepSpeed gives a trainer's scheduler the state in this file, and there is none.
    assert loaded(ours / MODEL_STATES)["lr_scheduler"] is None
    assert "load_lr_scheduler_states=False" in done.out
    files = {path.relative_to(theirs) for path in theirs.glob("zero/*/*.pt")}
    assert {path.relative_to(ours) for path in ours.glob("zero/*/*.pt")} == files
    for file in sorted(files):
        found, expected = torch.load(ours / file, weights_only=True), torch.load(theirs / file, weights_only=True)
        if file.name == "step.pt":
            assert torch.equal(found, expected)
        else:
            assert_alike(found, expected, str(file))
    options = loaded(ours / "zero" / "optimizer_state.pt")
    expected = {"lr": 4e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # those of the golden's trainer
    assert all({name: group[name] for name in expected} == expected for group in options["param_groups"])
    assert options["clip_grad"] == 1.0
    other = ("--to", "universal", "--for", "pipeline", "--tied-key", "tok_embed")
    run("export", tmp_path / "packed", *other, "--out", tmp_path / "other")
    named = {path.name.replace(".tok_embed.", ".embed.") for path in (tmp_path / "other").glob("*/zero/*")}
    assert named == {path.name for path in theirs.glob("zero/*")}


@pytest.mark.parametrize("names", ["hf", "pipeline"])
@pytest.mark.parametrize("tied", [False, True])
def test_optimizer_state_survives_the_way_through_a_universal_checkpoint(
    names: str, tied: bool, tmp_path: Path
) -> None:
    trained = write_trained(tmp_path, "pp=2", tie_word_embeddings=tied)
    run("export", trained, "--to", "universal", "--for", names, "--out", tmp_path / "out")
    pack(tmp_path / "out", tmp_path / "again", "pp=3")
    found, expected = moments_of(tmp_path / "again"), moments_of(trained)
    for kind in MOMENTS:  # of random bytes, some of which are NaN
        bits = ({name: state[name].view(torch.int32) for name in state} for state in (found[kind], expected[kind]))
        assert_alike(*bits, kind)
    before, after = (
        json.loads((one / "manifest.json").read_text())["training"] for one in (trained, tmp_path / "again")
    )
    assert (after["step"], after["optimizer"]) == (before["step"], before["optimizer"])
    run("export", trained, "--to", "universal", "--for", names, "--weights-only", "--out", tmp_path / "weights")
    kinds = {path.name for path in (tmp_path / "weights").rglob("zero/*/*.pt")}
    assert kinds == {"fp32.pt"}


def set_groups(step: Path, apart: str, *options: dict[str, float]) -> None:
    """Give a parameter of a Universal Checkpoint a group of its own; the first options are those of all others."""
    others = [path.name for path in (step / "zero").iterdir() if path.is_dir() and path.name != apart]
    shapes = [dict.fromkeys(names, 0) for names in (others, [apart])]
    change(step / MODEL_STATES, lambda state: {**state, "param_shapes": shapes})
    group = loaded(step / STATE)["param_groups"][0]
    change(step / STATE, lambda state: {**state, "param_groups": [group | changes for changes in options]})


def groups_of(step: Path, bare: str, out: Path, *flags: str) -> list[tuple[float, list[str]]]:
    """Give a parameter of a Universal Checkpoint a group without weight decay; return the groups of its pack."""
    set_groups(step, bare, {"weight_decay": 0.1}, {"weight_decay": 0.0})
    run("pack", step.parent, "--layout", "pp=2", *flags, "--out", out)
    assert reshard("verify", out).code == 0
    found = json.loads((out / "manifest.json").read_text())["training"]["optimizer"]["groups"]
    return [(group["weight_decay"], group["fqns"]) for group in found]


def test_tied_weight_that_is_saved_as_the_head_is_in_the_group_of_its_owner(tmp_path: Path) -> None:
    trained, *_ = write_trained_head(tmp_path)
    run("export", trained, "--to", "universal", "--out", tmp_path / "out")
    (step,) = (tmp_path / "out").glob("global_step*")
    (step / "zero" / EMBEDDING).rename(step / "zero" / HEAD)
    assert groups_of(step, HEAD, tmp_path / "packed") == [(0.1, []), (0.0, [EMBEDDING])]


def test_parameter_that_is_dropped_is_in_no_group(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    run("export", trained, "--to", "universal", "--out", tmp_path / "out")
    (step,) = (tmp_path / "out").glob("global_step*")
    shutil.copytree(step / "zero" / "model.norm.weight", step / "zero" / "value.bias")
    assert groups_of(step, "value.bias", tmp_path / "packed", "--drop", "value") == [(0.1, [])]


def rates_of(packed: Path) -> tuple[float, list[tuple[float | None, list[str]]]]:
    training = json.loads((packed / "manifest.json").read_text())["training"]
    groups = [(group.get("rate_factor"), group["fqns"]) for group in training["optimizer"]["groups"]]
    return training["learning_rate"]["peak"], groups


@pytest.mark.parametrize(
    ("others", "own"),
    [({"lr": 1e-5}, {"lr": 1e-3}), ({"lr": 0.0, "initial_lr": 1e-5}, {"lr": 0.0, "initial_lr": 1e-3})],
    ids=["trained", "before its warmup"],
)
def test_rates_of_groups_become_factors_of_one(others: dict[str, float], own: dict[str, float], tmp_path: Path) -> None:
    run("export", write_trained(tmp_path, "pp=2"), "--to", "universal", "--out", tmp_path / "out")
    (step,) = (tmp_path / "out").glob("global_step*")
    set_groups(step, HEAD, others, own)
    packed = pack(step.parent, tmp_path / "packed")
    expected = others["lr"], [(None, []), (pytest.approx(100), [HEAD])]
    assert rates_of(packed) == expected
    for form in ("universal", "megatron", *(() if others["lr"] else ("dcp",))):
        error = refusal("export", packed, "--to", form, "--out", tmp_path / form)
        assert error.found[:2] == (3, "checkpoint.other-optimizer")
    if others["lr"]:
        run("export", packed, "--to", "dcp", "--out", tmp_path / "dcp")
        assert rates_of(pack(tmp_path / "dcp", tmp_path / "again")) == expected


def test_rate_that_is_a_multiple_of_zero_is_refused(tmp_path: Path) -> None:
    run("export", write_trained(tmp_path, "pp=2"), "--to", "universal", "--out", tmp_path / "out")
    (step,) = (tmp_path / "out").glob("global_step*")
    set_groups(step, HEAD, {"lr": 0.0}, {"lr": 1e-3})
    error = refusal("pack", step.parent, "--layout", "pp=2", "--out", tmp_path / "packed")
    assert error.found[:2] == (3, "source.bad-optimizer-state")


def test_layers_of_a_model_whose_config_has_more_mtp_layers_than_its_files_are_read(tmp_path: Path) -> None:
    expected = huggingface_state("deepseek_v3", tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    run("export", pack(tmp_path / "model", tmp_path / "packed"), "--to", "deepspeed", "--out", tmp_path / "out")
    run("export", pack(tmp_path / "out", tmp_path / "again"), "--to", "hf", "--out", tmp_path / "exported")
    assert_alike(load_file(tmp_path / "exported" / "model.safetensors"), expected, "weights")


@pytest.mark.parametrize("form", ["deepspeed", "universal", "pipeline"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_survive_the_way_through_deepspeed(kind: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path / "model")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    pack(tmp_path / "model", tmp_path / "packed")
    to = ("--to", "universal", "--for", "pipeline") if form == "pipeline" else ("--to", form)
    run("export", tmp_path / "packed", *to, "--out", tmp_path / "out")
    pack(tmp_path / "out", tmp_path / "again", "pp=1")
    run("export", tmp_path / "again", "--to", "hf", "--out", tmp_path / "exported")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    if form == "deepspeed" and CONFIGS[kind].tie_word_embeddings:  # a layer of its own has the tied head as well
        (tied,) = (fqn for fqn in expected if fqn.endswith(("embed_tokens.weight", "wte.weight")))
        assert torch.equal(found.pop("lm_head.weight"), expected[tied])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "flags",
    [
        ("--to", "deepspeed", "--weights-only"),
        ("--to", "deepspeed", "--tied-key", "tok_embed"),
        ("--to", "universal", "--tied-key", "tok_embed"),
        ("--to", "deepspeed", "--for", "pipeline"),
        ("--to", "universal", "--for", "torchtitan"),
        ("--to", "universal", "--dtype", "bf16"),
        ("--to", "dcp", "--for", "pipeline"),
    ],
)
def test_flags_of_another_format_are_refused(flags: tuple[str, ...], tmp_path: Path) -> None:
    pack(GOLDEN / "llama", tmp_path / "packed")
    error = refusal("export", tmp_path / "packed", *flags, "--out", tmp_path / "out")
    assert error.found[1] == "options.conflict"


def test_key_that_is_no_name_of_a_module_is_refused(tmp_path: Path) -> None:
    pack(GOLDEN / "gpt2", tmp_path / "packed")
    flags = ("--to", "universal", "--for", "pipeline", "--tied-key")
    for key in ("../..", "tok.embed"):
        error = refusal("export", tmp_path / "packed", *flags, key, "--out", tmp_path / "out")
        assert error.found[1] == "options.invalid-value"


def test_universal_checkpoint_of_a_model_with_buffers_is_refused(tmp_path: Path) -> None:
    sizes = {
        **SIZES,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(**sizes, **moe, n_shared_experts=1, first_k_dense_replace=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed")
    error = refusal("export", tmp_path / "packed", "--to", "universal", "--out", tmp_path / "out")
    assert error.found[1] == "model.not-in-pipeline"
