"""AdamW as torch saves it in DCP folders: each form is packed, exported, and resumed by torch's set_state_dict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM

from tests.builders import pack, refusal, run
from tests.fast.reshard.formats.dcp.test_dcp_source import CONFIGS, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Model = torch.nn.Module
Options = dict[str, Any]


def new_model(seed: int) -> Model:
    torch.manual_seed(seed)
    model: Model = AutoModelForCausalLM.from_config(CONFIGS["llama"])  # type: ignore[no-untyped-call]
    return model


def one_group(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)


def two_groups(model: Model, *, named: bool = False) -> torch.optim.Optimizer:
    decayed: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decayed[parameter.dim() > 1].append((name, parameter) if named else parameter)
    groups = [{"params": decayed[False], "weight_decay": 0.0}, {"params": decayed[True], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def named_groups(model: Model) -> torch.optim.Optimizer:
    return two_groups(model, named=True)


def nested(model: Model, optimizer: torch.optim.Optimizer) -> Options:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def flattened(model: Model, optimizer: torch.optim.Optimizer) -> Options:
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": weights, "optimizer": state}


def by_number(model: Model, optimizer: torch.optim.Optimizer) -> Options:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def train(model: Model, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    losses = []
    for step in range(2):
        tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(seed + step))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("groups", "form"),
    [
        (one_group, nested), (two_groups, nested), (two_groups, flattened), (one_group, by_number),
        (named_groups, by_number),
    ],
)  # fmt: skip
def test_torch_resumes_from_what_its_optimizer_becomes(
    groups: Callable[[Model], torch.optim.Optimizer], form: Callable[..., Options], tmp_path: Path
) -> None:
    model = new_model(0)
    optimizer = groups(model)
    train(model, optimizer, 0)
    source = save(tmp_path / "step-2", "llama", form(model, optimizer))
    pack(source, tmp_path / "packed")
    manifest = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    assert manifest["training"]["learning_rate"]["peak"] == 0.01
    assert "left_out" not in manifest["source"] or manifest["source"]["left_out"] == []
    run("export", tmp_path / "packed", "--to", "dcp", "--out", tmp_path / "exported")
    other = new_model(1)
    resumed = two_groups(other) if groups is named_groups else groups(other)
    weights, state = get_state_dict(other, resumed, options=FLAT)
    loaded: Options = {**weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path / "exported", no_dist=True)  # type: ignore[attr-defined]
    saved = loaded.pop("optimizer")
    set_state_dict(other, resumed, model_state_dict=loaded, optim_state_dict=saved, options=FLAT)
    for group in resumed.param_groups:
        group.update(foreach=None, fused=None)  # other kernels round differently
    decays = {group["weight_decay"] for group in resumed.param_groups}
    assert decays == {group["weight_decay"] for group in optimizer.param_groups}
    assert train(other, resumed, 5) == train(model, optimizer, 5)
    expected, found = flattened(model, optimizer), flattened(other, resumed)
    for key in ("model", "optimizer"):
        assert [name for name in found[key] if not is_same(expected[key][name], found[key][name])] == []


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def saved_by(make: Callable[[Model], torch.optim.Optimizer], form: Callable[..., Options]) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        model = new_model(0)
        optimizer = make(model)
        train(model, optimizer, 0)
        return save(place, "llama", form(model, optimizer))

    return write


def changed(change: Callable[[Options], object]) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        model = new_model(0)
        optimizer = one_group(model)
        train(model, optimizer, 0)
        state = nested(model, optimizer)
        change(state["optimizer"])
        return save(place, "llama", state)

    return write


def of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Model], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), lr=0.01, **options)


def in_two_groups(state: Options) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": state["param_groups"][0]["params"][:1]})


def in_no_group(state: Options) -> None:
    del state["param_groups"][0]["params"][0]


def with_another_kind(state: Options) -> None:
    next(iter(state["state"].values()))["max_exp_avg_sq"] = torch.zeros(3)


REFUSED: Mapping[str, Callable[[Path], Path]] = {
    "two groups by number, without names": saved_by(two_groups, by_number),
    "nadam": saved_by(of(torch.optim.NAdam), flattened),
    "radam": saved_by(of(torch.optim.RAdam), flattened),
    "amsgrad": saved_by(of(torch.optim.AdamW, amsgrad=True), nested),
    "a rate that is a tensor": saved_by(lambda model: torch.optim.AdamW(model.parameters(), torch.tensor(0.1)), nested),
    "an option that AdamW does not have": changed(lambda state: state["param_groups"][0].update(rectify=True)),
    "a parameter in two groups": changed(in_two_groups),
    "a parameter in no group": changed(in_no_group),
    "another kind of state": changed(with_another_kind),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_state_of_another_optimizer_is_refused(fault: str, tmp_path: Path) -> None:
    source = REFUSED[fault](tmp_path / "step-2")
    found = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "out").found
    assert found[:2] == (3, "source.bad-optimizer-state")
