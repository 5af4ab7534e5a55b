"""Folders of vLLM's ranks are sources; transformers' tensors, cut as vLLM's layers do by torch, are the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from tests.builders import refusal, reshard, run
from tests.fast.reshard.test_model_file import write_description
from tests.fast.reshard.test_vllm_export import CONFIGS, rank_of

State = dict[str, torch.Tensor]
STAGES = {1: [range(5)], 2: [range(3), range(3, 5)]}  # the layers of the stages, by their number


def served(kind: str, place: Path, pp: int = 1, tp: int = 2, num_parts: int = 1) -> State:
    """Write the folder that vLLM's ranks would write, and return transformers' tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(place)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for rank in range(tp):
        whole = rank_of(state, rank, tp)
        for stage, layers in enumerate(STAGES[pp]):
            top = {"model.embed_tokens.weight"} if stage == 0 else set()
            top |= {"model.norm.weight", "lm_head.weight"} if stage == pp - 1 else set()
            if kind.endswith("tied") and pp == 1:
                top.remove("model.embed_tokens.weight")
            prefixes = tuple(f"model.layers.{layer}." for layer in layers)
            names = [name for name in whole if name in top or name.startswith(prefixes)]
            at = f"pp-{stage}-tp-{rank}" if pp > 1 else f"rank-{rank}"
            for part in range(num_parts):
                tensors = {name: whole[name].clone() for name in names[part::num_parts]}
                save_file(tensors, place / f"model-{at}-part-{part}.safetensors")
    return state


def packed_from(source: Path, place: Path) -> State:
    """Pack over two stages, and return the tensors that an export gives back."""
    done = run("pack", source, "--layout", "pp=2", "--out", place / "packed")
    assert "left out: model.layers.*.self_attn.attn.*_scale" in done.err
    assert reshard("export", place / "packed", "--to", "hf", "--out", place / "back").code == 0
    return load_file(place / "back" / "model.safetensors")


@pytest.mark.parametrize(("pp", "tp", "num_parts"), [(1, 1, 1), (1, 2, 3), (1, 8, 1), (2, 4, 1)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_ranks_are_packed_as_the_model_that_they_were(
    kind: str, pp: int, tp: int, num_parts: int, tmp_path: Path
) -> None:
    expected = served(kind, tmp_path / "served", pp, tp, num_parts)
    if kind.endswith("tied"):
        del expected["lm_head.weight"]
    found = packed_from(tmp_path / "served", tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_check_inspect_and_an_index_that_was_copied_along(tmp_path: Path) -> None:
    served("llama", tmp_path / "served", pp=2)
    (tmp_path / "served" / "model.safetensors.index.json").write_text('{"weight_map": {}}')  # of the original
    packed_from(tmp_path / "served", tmp_path)
    checked = reshard("check", tmp_path / "served", "--against", tmp_path / "packed", "--bytes", "--json").json
    assert (checked["kind"], checked["num_tensors"], checked["problems"]) == ("vllm", 68, [])
    inspected = reshard("inspect", tmp_path / "served", "--json").json
    assert (inspected["format"], inspected["num_files"]) == ("vllm", 4)
    num_tensors = {part: found["num_tensors"] for part, found in inspected["parts"].items()}
    stages = {"stage 0": 3 * 12 + 1, "stage 1": 2 * 12 + 2}  # with attention's scales
    assert num_tensors == {f"{stage}, rank {rank}": num for stage, num in stages.items() for rank in range(2)}


FIRST, SECOND = "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"
QKV = "model.layers.1.self_attn.qkv_proj.weight"


def change(path: Path, act: Callable[[State], object]) -> None:
    state = load_file(path)
    act(state)
    save_file(state, path)


def add(tensors: Mapping[str, torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: change(folder / FIRST, lambda state: state.update(tensors))


def on_all(act: Callable[[State], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in (FIRST, SECOND):
            change(folder / name, act)

    return damage


def one_more(name: str) -> Callable[[State], object]:
    return lambda state: state.update({name: state[name] + 1})


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file of a rank": (lambda folder: (folder / FIRST).unlink(), "source.vllm-ranks"),
    "no file of a part": (
        lambda folder: (folder / SECOND).rename(folder / SECOND.replace("part-0", "part-1")), "source.vllm-ranks"
    ),
    "a rank of another run": (
        lambda folder: (folder / SECOND.replace("rank-1", "rank-2")).write_bytes((folder / SECOND).read_bytes()),
        "source.vllm-ranks",
    ),
    "a rank of many": (
        lambda folder: (folder / SECOND).rename(folder / "model-rank-99999-part-0.safetensors"), "source.vllm-ranks"
    ),
    "a run with stages": (
        lambda folder: save_file({}, folder / "model-pp-0-tp-0-part-0.safetensors"), "source.vllm-ranks"
    ),
    "a shard of the original": (lambda folder: save_file({}, folder / "model.safetensors"), "source.no-index"),
    "a file cut short": (
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1]), "header.wrong-data-length"
    ),
    "no tensor of a rank": (
        lambda folder: change(folder / SECOND, lambda state: state.pop(QKV)), "source.missing-tensor"
    ),
    "no tensor of any": (on_all(lambda state: state.pop(QKV)), "source.missing-tensor"),
    "a tensor twice": (
        lambda folder: save_file({QKV: torch.zeros(64, 32)}, folder / FIRST.replace("part-0", "part-1")),
        "source.tensor-twice",
    ),
    "an unknown tensor": (on_all(lambda state: state.update(other=torch.zeros(2))), "source.unknown-tensor"),
    "a layer more": (
        on_all(lambda state: state.update({QKV.replace("1", "5"): state[QKV].clone()})), "source.unknown-tensor"
    ),
    "another shape": (add({QKV: torch.zeros(49, 32)}), "source.shape-mismatch"),
    "no dimensions": (add({QKV: torch.tensor(0.0)}), "source.shape-mismatch"),
    "a vocabulary that is not padded": (add({"lm_head.weight": torch.zeros(50, 32)}), "source.shape-mismatch"),
    "quantized": (
        on_all(lambda state: state.update({QKV: state[QKV].to(torch.float8_e4m3fn)})), "source.quantized-dtype"
    ),
    "dtypes of its ranks": (add({"model.norm.weight": torch.ones(32).half()}), "source.ranks-differ"),
    "dtypes of slices": (add({QKV: torch.zeros(48, 32).half()}), "shard.inconsistent-slices"),
    "norms of its ranks": (
        lambda folder: change(folder / SECOND, one_more("model.norm.weight")), "source.ranks-differ"
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "source.no-config"),
    "another config": (
        lambda folder: (folder / "config.json").write_text(
            json.dumps(json.loads((folder / "config.json").read_text()) | {"intermediate_size": 96})
        ),
        "source.shape-mismatch",
    ),
    "a family that is not known": (
        lambda folder: GPT2Config(n_embd=16, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(
            folder
        ),
        "model.not-in-vllm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_are_not_a_model_are_refused(fault: str, tmp_path: Path) -> None:
    served("qwen3", tmp_path / "served")
    damage, code = FAULTS[fault]
    damage(tmp_path / "served")
    error = refusal("pack", tmp_path / "served", "--layout", "pp=2", "--out", tmp_path / "out", "--quiet")
    assert error.found[1] == code
    assert not (tmp_path / "out").exists()


def test_key_heads_that_ranks_share_and_tied_heads_must_be_equal(tmp_path: Path) -> None:
    for kind, name, row, pp, tp, path in (
        ("qwen3", QKV, -1, 1, 4, SECOND),  # of the values
        ("llama-tied", "lm_head.weight", 0, 2, 2, "model-pp-1-tp-1-part-0.safetensors"),
    ):
        folder = tmp_path / kind
        served(kind, folder, pp, tp)
        change(folder / path, lambda state, name=name, row=row: state[name][row].add_(1))
        error = refusal("pack", folder, "--layout", "pp=2", "--out", tmp_path / "out", "--quiet")
        assert error.found[1] == "source.ranks-differ"


def test_what_needs_whole_files_is_refused(tmp_path: Path) -> None:
    served("qwen3", tmp_path / "served")
    args = ("pack", tmp_path / "served", "--layout", "pp=2", "--out", tmp_path / "out", "--quiet")
    assert refusal(*args, "--virtual").found[1] == "options.cannot-be-virtual"
    described = write_description(tmp_path / "model.toml")
    assert refusal(*args, "--model", described).found[1] == "options.model-of-manifest"
