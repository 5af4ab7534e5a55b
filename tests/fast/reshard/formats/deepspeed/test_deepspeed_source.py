"""Checkpoints that DeepSpeed wrote are sources; the parameters that its ranks had are the oracle."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.builders import refusal, reshard, run
from tools.tiny_models import tiny_config

GOLDEN = Path(__file__).resolve().parents[4] / "data" / "golden" / "deepspeed"
STEPS = {
    "llama": "global_step2",
    "gpt2": "global_step2",
    "gpt2-universal": "global_step2_universal",
    "llama-deepspeed": "global_step001",
    "mpt": "global_step2",
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def pack(source: Path, out: Path, *args: str) -> dict[str, torch.Tensor]:
    """Pack over two stages, and return the tensors that an export gives back."""
    run("pack", source, "--layout", "pp=2", "--out", out, *args)
    assert reshard("export", out, "--to", "hf", "--out", out.with_name("exported")).code == 0
    return load_file(out.with_name("exported") / "model.safetensors")


def copy(name: str, place: Path) -> tuple[Path, Path]:
    """Return a copy of what DeepSpeed wrote, and the folder of its step."""
    shutil.copytree(GOLDEN / name, place / name)
    return place / name, place / name / STEPS[name]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("is_named", [True, False], ids=["step", "latest"])
def test_packed_weights_are_those_that_the_ranks_had(name: str, is_named: bool, tmp_path: Path) -> None:
    source = GOLDEN / name / STEPS[name] if is_named else GOLDEN / name
    expected = load_file(GOLDEN / f"{name}.safetensors")
    if name == "mpt":  # whose tied head is a layer of its own
        expected["lm_head.weight"] = expected["transformer.wte.weight"]
    found = pack(source, tmp_path / "packed")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)


def test_tied_head_may_be_all_of_the_input_layer_once_more(tmp_path: Path) -> None:
    folder, step = copy("gpt2", tmp_path)
    expected = load_file(GOLDEN / "gpt2.safetensors")
    first, head = step / "layer_00-model_states.pt", step / "layer_04-model_states.pt"
    other_positions = {"wpe.weight": torch.zeros(16, 8)}  # never used, and so never trained
    torch.save(torch.load(first, weights_only=True) | other_positions, head)
    found = pack(folder, tmp_path / "packed")
    assert torch.equal(found.pop("lm_head.weight"), expected["transformer.wte.weight"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)
    left_out = json.loads((tmp_path / "packed" / "manifest.json").read_text())["source"]["left_out"]
    assert f"{head.name}: wpe.weight" in left_out
    change(head, lambda state: {**state, "wte.weight": state["wte.weight"] + 1})
    assert refused(folder, tmp_path) == "source.tied-values-differ"
    change(head, lambda state: {**state, "type.weight": state["wpe.weight"]})
    assert refused(folder, tmp_path) == "source.other-layers"


def test_step_without_a_config_takes_that_of_its_folder(tmp_path: Path) -> None:
    folder, step = copy("llama", tmp_path)
    shutil.move(folder / "config.json", step)
    pack(step, tmp_path / "packed")
    (step / "config.json").unlink()
    assert refused(step, tmp_path) == "source.no-config"


def test_optimizer_state_is_that_of_the_universal_checkpoint(tmp_path: Path) -> None:
    step = GOLDEN / "gpt2-universal" / STEPS["gpt2-universal"]
    pack(GOLDEN / "gpt2-universal", tmp_path / "packed")
    manifest = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    training = manifest["training"]
    assert (training["step"], training["dtype"]) == (2, "F32")
    group = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "fqns": []}
    assert training["optimizer"] == {"name": "AdamW", "max_norm": 1.0, "groups": [group]}
    assert training["learning_rate"]["peak"] == 4e-3
    names = {"tied_modules.embed.wte": "transformer.wte", "2.mlp.c_proj": "transformer.h.1.mlp.c_proj"}
    for kind, found in moments_of(tmp_path / "packed").items():
        for theirs, ours in names.items():
            state = torch.load(step / "zero" / f"{theirs}.weight" / f"{kind}.pt", weights_only=True)["param"]
            assert torch.equal(found[f"{ours}.weight"], state)


def moments_of(packed: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer state of a packed folder, by kind."""
    manifest = json.loads((packed / "manifest.json").read_text())
    shards = [shard for stage in manifest["stages"] for shard in stage["shards"]]
    return {
        kind: {
            name: tensor
            for shard in shards
            if shard["holds"] == kind
            for name, tensor in load_file(packed / shard["path"]).items()
        }
        for kind in MOMENTS
    }


def refused(source: Path, tmp_path: Path) -> str:
    return refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "refused", "--quiet").found[1]


def rename(step: Path, before: str, after: str) -> None:
    (step / f"layer_{before}-model_states.pt").rename(step / f"layer_{after}-model_states.pt")


def change(path: Path, act: Callable[[dict[str, Any]], Any]) -> None:
    torch.save(act(torch.load(path, weights_only=True)), path)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


def swap_layers(step: Path) -> None:
    rename(step, "03-model_00", "09-model_00")
    rename(step, "04-model_00", "03-model_00")
    rename(step, "09-model_00", "04-model_00")


def change_options(step: Path, **options: Any) -> None:
    """Write an optimizer's options, as DeepSpeed does beside objects of its own."""
    group = {"lr": 4e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0], **options}
    beside = {name: group.pop(name) for name in ("clip_grad", "overflow", "momentum") if name in group}
    torch.save({"ds_version": "0.19.8", "clip_grad": 1.0, **beside, "param_groups": [group]}, step / STATE)


def add_group(step: Path, **options: Any) -> None:
    """Give an optimizer a second group, with other options than the first; no rank says whose it is."""
    of_all_ranks(param_shapes=None)(step)
    change_options(step)
    (group,) = torch.load(step / STATE, weights_only=True)["param_groups"]
    change(step / STATE, lambda state: {**state, "param_groups": [group, group | options]})


def configure(step: Path, kind: str, **params: object) -> None:
    """Let the config of DeepSpeed name an optimizer."""
    for rank in step.glob("mp_rank_*_model_states.pt"):
        change(rank, lambda state: {**state, "ds_config": {"optimizer": {"type": kind, "params": params}}})


@pytest.mark.parametrize(
    ("kind", "params", "own", "is_refused"),
    [
        ("Adam", {"adam_w_mode": False}, {}, True),
        ("adam", {"adam_w_mode": False, "torch_adam": True}, {}, True),
        ("Adam", {"adam_w_mode": False}, {"weight_decay": 0.0}, False),
        ("Adam", {"adam_w_mode": False}, {"decoupled_weight_decay": True}, False),  # the trainer's own optimizer
        ("Adam", {"torch_adam": True}, {}, False),
        ("Adam", {}, {}, False),
        ("AdamW", {"adam_w_mode": False}, {}, False),
    ],
)
def test_adam_is_adamw_unless_its_decay_is_not_decoupled(
    kind: str, params: dict[str, Any], own: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    _, step = copy("gpt2-universal", tmp_path)
    configure(step, kind, **params)
    change_options(step, **own)  # a group of DeepSpeed's own optimizers, which says less
    if is_refused:
        assert refused(step, tmp_path) == "source.bad-optimizer-state"
    else:
        pack(step, tmp_path / "packed")


LAYER = "layer_01-model_00-model_states.pt"
LAYER_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no head": (lambda step: (step / "layer_04-model_00-model_states.pt").unlink(), "source.missing-tensor"),
    "no decoder": (lambda step: (step / LAYER).unlink(), "source.other-layers"),
    "a layer more": (
        lambda step: torch.save({"weight": torch.zeros(8)}, step / "layer_07-model_00-model_states.pt"),
        "source.other-layers",
    ),
    "norm and head swapped": (swap_layers, "source.shape-mismatch"),
    "no parameter of a layer": (
        lambda step: change(step / LAYER, without("mlp.up_proj.weight")), "source.other-layers"
    ),
    "another name": (
        lambda step: change(step / LAYER, lambda state: {f"{name}s": state[name] for name in state}),
        "source.other-layers",
    ),
    "a value that is no tensor": (
        lambda step: change(step / LAYER, lambda state: {**state, "step": 3}), "source.bad-pickle"
    ),
    "two files of one layer": (
        lambda step: shutil.copy(step / LAYER, step / "layer_1-model_00-model_states.pt"), "source.tensor-twice"
    ),
    "tensor-parallel slices": (
        lambda step: shutil.copy(step / LAYER, step / "layer_01-model_01-model_states.pt"), "source.layer-slices"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", LAYER_FAULTS)
def test_layers_that_are_not_the_models_are_refused(fault: str, tmp_path: Path) -> None:
    _, step = copy("llama", tmp_path)
    damage, code = LAYER_FAULTS[fault]
    damage(step)
    assert refused(step, tmp_path) == code


def test_step_of_a_plain_model_is_refused_without_a_word_of_partitions(tmp_path: Path) -> None:
    _, step = copy("llama", tmp_path)
    for path in (*step.glob("layer_*"), *step.glob("*_optim_states.pt")):
        path.unlink()
    assert refusal("plan", step, "--layout", "pp=2").found == (3, "source.no-layers", str(step))


def test_partitions_of_zero_are_refused_with_how_to_convert_them(tmp_path: Path) -> None:
    folder, step = copy("llama", tmp_path)
    for path in step.glob("layer_*"):
        path.unlink()
    for source in (folder, step):
        error = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "refused", "--quiet")
        assert error.found == (3, "source.zero-partitions", str(step))
        assert f"--input_folder {step} --output_folder {step}_universal" in error.text
        assert [each["code"] for each in reshard("check", source, "--json").json["problems"]] == [error.found[1]]


def test_step_of_zero_beside_safetensors_is_refused_with_how_to_pack_those(tmp_path: Path) -> None:
    """As transformers' Trainer saves it."""
    folder, step = copy("llama", tmp_path)
    for path in step.glob("layer_*"):
        path.unlink()
    shutil.copyfile(GOLDEN / "llama.safetensors", folder / "model.safetensors")
    args = ("pack", folder, "--layout", "pp=2", "--out", tmp_path / "packed")
    error = refusal(*args)
    assert error.found == (3, "source.zero-partitions", str(step))
    assert f"move {step.name}/ and latest elsewhere" in error.text
    shutil.rmtree(step)
    (folder / "latest").unlink()
    assert reshard(*args).code == 0


def of_all_ranks(**values: object) -> Callable[[Path], object]:
    return lambda step: [change(path, lambda state: {**state, **values}) for path in step.glob("mp_rank*")]


def test_what_else_a_trainer_saved_is_named(tmp_path: Path) -> None:
    _, step = copy("gpt2-universal", tmp_path)
    of_all_ranks(lr_scheduler={"last_step": 2}, client=3, ds_config={"sparse_attention": {"mode": "fixed"}})(step)
    pack(step, tmp_path / "packed")
    left_out = json.loads((tmp_path / "packed" / "manifest.json").read_text())["source"]["left_out"]
    assert {"client", "lr_scheduler", "ds_config: sparse_attention"} <= set(left_out)


MODEL_STATES = "mp_rank_00_model_states.pt"
EMBEDDING, STATE = "zero/tied_modules.embed.wte.weight", "zero/optimizer_state.pt"
UNIVERSAL_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no parameter": (lambda step: shutil.rmtree(step / "zero/1.ln_1.bias"), "source.other-layers"),
    "no state of one": (lambda step: (step / f"{EMBEDDING}/exp_avg.pt").unlink(), "source.missing-tensor"),
    "one kind of state": (
        lambda step: [path.unlink() for path in step.glob("zero/*/exp_avg_sq.pt")], "source.bad-optimizer-state"
    ),
    "no options": (lambda step: (step / STATE).unlink(), "source.bad-optimizer-state"),
    "another optimizer": (lambda step: change_options(step, betas=0.9), "source.bad-optimizer-state"),
    "Adam with L2": (lambda step: change_options(step, decoupled_weight_decay=False), "source.bad-optimizer-state"),
    "two learning rates": (lambda step: add_group(step, lr=1e-5, params=[1]), "source.bad-optimizer-state"),
    "growing weights": (lambda step: change_options(step, weight_decay=-0.1), "source.bad-optimizer-state"),
    "eps of any size": (lambda step: change_options(step, eps=10**400), "source.bad-optimizer-state"),
    "clipping to any norm": (lambda step: change_options(step, clip_grad=10**400), "source.bad-optimizer-state"),
    "clipping to less": (lambda step: change_options(step, clip_grad=-1.0), "source.bad-optimizer-state"),
    "infinite steps": (
        lambda step: torch.save(torch.tensor(torch.inf), step / f"{EMBEDDING}/step.pt"), "source.bad-optimizer-state"
    ),
    "different steps": (
        lambda step: torch.save(torch.tensor(5.0), step / f"{EMBEDDING}/step.pt"), "source.bad-optimizer-state"
    ),
    "another shape": (
        lambda step: change(step / f"{EMBEDDING}/fp32.pt", lambda state: {"param": torch.zeros(16, 9)}),
        "source.shape-mismatch",
    ),
    "another dtype": (
        lambda step: change(step / f"{EMBEDDING}/fp32.pt", lambda state: {"param": state["param"].bfloat16()}),
        "source.bad-universal",
    ),
    "no tensor": (lambda step: torch.save({}, step / f"{EMBEDDING}/fp32.pt"), "source.bad-universal"),
    "steps of a rank": (
        lambda step: change(step / MODEL_STATES, lambda state: {**state, "global_steps": 3}),
        "source.bad-optimizer-state",
    ),
    "steps of all ranks": (of_all_ranks(global_steps=3), "source.bad-optimizer-state"),
    "skipped steps": (of_all_ranks(skipped_steps=1), "source.bad-optimizer-state"),
    "samples of any type": (of_all_ranks(global_samples="8"), "source.bad-optimizer-state"),
    "degree of another model": (of_all_ranks(mp_world_size=4), "source.bad-optimizer-state"),
    "Lion": (of_all_ranks(ds_config={"optimizer": {"type": "Lion"}}), "source.bad-optimizer-state"),
    "no file of a rank": (lambda step: (step / MODEL_STATES).unlink(), "source.bad-optimizer-state"),
    "an overflow": (lambda step: change_options(step, overflow=True), "source.bad-optimizer-state"),
    "state of another optimizer": (lambda step: change_options(step, momentum=1), "source.bad-optimizer-state"),
    "a part of a parameter": (
        lambda step: change(step / f"{EMBEDDING}/fp32.pt", lambda state: {**state, "sub_params": 3}),
        "source.bad-universal",
    ),
    "layers beside it": (
        lambda step: torch.save({"weight": torch.zeros(2)}, step / "layer_00-model_states.pt"),
        "source.two-checkpoints",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNIVERSAL_FAULTS)
def test_universal_checkpoints_that_are_not_whole_are_refused(fault: str, tmp_path: Path) -> None:
    _, step = copy("gpt2-universal", tmp_path)
    damage, code = UNIVERSAL_FAULTS[fault]
    damage(step)
    assert refused(step, tmp_path) == code


def test_flat_parameters_of_zero_3_have_the_models_shapes(tmp_path: Path) -> None:
    _, step = copy("gpt2-universal", tmp_path)
    expected = load_file(GOLDEN / "gpt2-universal.safetensors")
    for path in step.glob("zero/*/*.pt"):
        if path.name != "step.pt":
            change(path, lambda state: state["param"].flatten())
    found = pack(step, tmp_path / "packed")
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)


def test_flat_parameters_whose_shapes_no_config_says_are_refused(tmp_path: Path) -> None:
    """The catalogue knows the names of an architecture's tensors, and not their sizes."""
    kind = transformers.Olmo2ForCausalLM
    model = kind(tiny_config(kind))
    model.save_pretrained(tmp_path / "saved")
    step, weights = tmp_path / "saved" / "step", model.state_dict()
    for is_flat in (True, False):
        for name, weight in weights.items():
            (step / "zero" / name).mkdir(parents=True, exist_ok=True)
            saved = weight.flatten() if is_flat else weight
            torch.save({"param": saved}, step / "zero" / name / "fp32.pt")
        if is_flat:
            assert refused(step, tmp_path) == "source.shape-mismatch"
    found = pack(step, tmp_path / "packed")
    assert all(torch.equal(found[fqn], weights[fqn]) for fqn in weights)


@pytest.mark.parametrize("content", ["../gpt2", "step9"])
def test_latest_that_names_no_folder_is_refused(content: str, tmp_path: Path) -> None:
    folder, _ = copy("llama", tmp_path)
    (folder / "latest").write_text(content)
    assert refused(folder, tmp_path) == "source.which-step"


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("llama", LAYER, "source.bad-pickle"),
        ("gpt2-universal", f"{EMBEDDING}/fp32.pt", "source.bad-universal"),
        ("gpt2-universal", f"{EMBEDDING}/step.pt", "source.bad-optimizer-state"),
        ("gpt2-universal", STATE, "source.bad-optimizer-state"),
        ("gpt2-universal", "mp_rank_00_model_states.pt", "source.bad-optimizer-state"),
    ],
)
def test_payload_of_a_pickle_does_not_run(name: str, path: str, code: str, tmp_path: Path) -> None:
    _, step = copy(name, tmp_path)
    payload = Payload(tmp_path / "ran")
    torch.save(payload, step / path, pickle_module=pickle)
    assert refused(step, tmp_path) == code
    assert not (tmp_path / "ran").exists()
    torch.load(step / path, weights_only=False)  # of the payload alone
    assert (tmp_path / "ran").exists(), "the payload would have run"


@pytest.mark.parametrize(("name", "num_tensors", "num_files"), [("llama", 21, 5), ("gpt2-universal", 84, 112)])
def test_inspect_and_check_know_the_format(name: str, num_tensors: int, num_files: int, tmp_path: Path) -> None:
    folder, step = copy(name, tmp_path)
    parts = reshard("inspect", step, "--json").json
    assert (parts["format"], parts["num_files"]) == ("deepspeed", num_files)
    assert sum(part["num_tensors"] for part in parts["parts"].values()) == num_tensors
    checked = reshard("check", folder, "--json").json
    assert (checked["num_tensors"], checked["problems"]) == (num_tensors, [])
    pack(folder, tmp_path / "packed")
    against = reshard("check", folder, "--against", tmp_path / "packed", "--bytes", "--json")
    assert (against.code, against.json["problems"]) == (0, [])
    (step / "mp_rank_00_model_states.pt").unlink()
    next(iter(step.glob("zero/2.*/fp32.pt" if "universal" in name else LAYER))).unlink()
    assert [each["code"] for each in reshard("check", folder, "--json").json["problems"]] == ["source.other-layers"]
