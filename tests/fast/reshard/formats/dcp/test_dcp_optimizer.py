"""Optimizers as torch saves them in DCP folders: each form is packed, exported, and resumed by set_state_dict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig

from manifests.codec import decode_manifest
from manifests.models import model_shape
from manifests.trained import STEPS_NAME, decode_steps
from reshard import export
from runner.config.optimizers import check_state_fits, optimizer_of
from runner.config.schema import OptimOptions
from runner.training.algorithms import declare_kinds
from tests.builders import EMBEDDING, HEAD, pack, refusal, reshard, run
from tests.fast.reshard.formats.dcp.test_dcp_source import CONFIGS, SIZES, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Model = torch.nn.Module
Options = dict[str, Any]
Optimizers = list[torch.optim.Optimizer]


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


def muon_and_adamw(model: Model) -> Optimizers:
    """Three groups of two classes, with rates of their own."""
    muon, others, norms = list[Any](), list[Any](), list[Any]()
    for name, parameter in model.named_parameters():
        (norms if parameter.dim() == 1 else muon if "layers" in name else others).append(parameter)
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(muon, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.01),
    ]


def sgd_and_adafactor(model: Model) -> Optimizers:
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts["mlp" in name].append(parameter)
    return [
        torch.optim.SGD(parts[True], lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
        torch.optim.Adafactor(parts[False], lr=0.05, eps=(1e-6, 1e-3), weight_decay=0.02),
    ]


def amsgrad_and_adam(model: Model) -> Optimizers:
    first, *others = model.parameters()
    adamw = torch.optim.AdamW([first], lr=0.01, amsgrad=True, weight_decay=0.1)
    return [adamw, torch.optim.Adam(others, lr=0.01, weight_decay=0.3)]


def sgd_alone(model: Model) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def nested(model: Model, optimizer: torch.optim.Optimizer) -> Options:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def flattened(model: Model, optimizer: torch.optim.Optimizer) -> Options:
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    return {"model": weights, "optimizer": state}


def by_number(model: Model, optimizer: torch.optim.Optimizer) -> Options:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def with_epochs(model: Model, optimizer: torch.optim.Optimizer) -> Options:
    """As of a loop whose schedule steps once an epoch."""
    return {**nested(model, optimizer), "lr_scheduler": {"last_epoch": 1}}


def save_on_two_ranks(folder: Path, state: Options) -> None:
    """Save what both ranks have, as DDP's do: each writes some of it."""
    planners, writer = (dcp.DefaultSavePlanner(), dcp.DefaultSavePlanner()), dcp.FileSystemWriter(folder)
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    writer.set_up_storage_writer(True)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True)
    ]
    writer.finish(metadata, results)


def train(model: Model, optimizer: torch.optim.Optimizer | Optimizers, seed: int) -> list[float]:
    losses, optimizers = [], optimizer if isinstance(optimizer, list) else [optimizer]
    for step in range(2):
        tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(seed + step))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        for one in optimizers:
            one.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def test_state_by_number_is_of_the_parameters_in_the_order_of_a_state_dict_that_two_ranks_wrote(tmp_path: Path) -> None:
    model = new_model(0)
    optimizer = one_group(model)
    train(model, optimizer, 0)
    save(tmp_path / "step-2", "llama", model.state_dict())  # its config
    save_on_two_ranks(tmp_path / "step-2", by_number(model, optimizer))
    listed = dcp.FileSystemReader(tmp_path / "step-2").read_metadata().state_dict_metadata
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    assert [name for name in listed if name in names] != names
    pack(tmp_path / "step-2", tmp_path / "packed", "pp=1")
    (file,) = (tmp_path / "packed/stage-000/exp_avg").iterdir()
    packed = load_file(file)
    assert packed.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(packed[name], optimizer.state[parameter]["exp_avg"]), name


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


def test_epochs_of_a_schedule_are_no_steps_of_the_optimizer(tmp_path: Path) -> None:
    pack(saved_by(one_group, with_epochs)(tmp_path / "step-2"), tmp_path / "packed")
    manifest = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    assert (manifest["training"]["step"], manifest["source"]["left_out"]) == (2, ["lr_scheduler"])


@pytest.mark.parametrize("lost", [(), (EMBEDDING,)])
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_state_of_a_tied_weight_is_its_owners_under_whichever_name_each_is_saved(
    name: str, lost: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "llama", LlamaConfig(**SIZES | {"tie_word_embeddings": True}))
    model = new_model(0)
    tied, *others = model.parameters()
    groups = [{"params": others, "weight_decay": 0.1}, {"params": [tied], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    train(model, optimizer, 0)
    saved = flattened(model, optimizer)
    weights = {fqn: weight for fqn, weight in saved["model"].items() if fqn not in lost}
    renamed = {key.replace(EMBEDDING, name): value for key, value in saved["optimizer"].items()}
    pack(save(tmp_path / "step-2", "llama", {"model": weights, "optimizer": renamed}), tmp_path / "packed")
    assert reshard("verify", tmp_path / "packed").code == 0
    run("export", tmp_path / "packed", "--to", "dcp", "--out", tmp_path / "exported")
    wanted = {key: value for key, value in saved["optimizer"].items() if key.endswith(("exp_avg", "weight_decay"))}
    found: Options = {key: torch.zeros_like(old) if torch.is_tensor(old) else -1 for key, old in wanted.items()}
    loaded = {"optimizer": found}
    dcp.load(loaded, checkpoint_id=tmp_path / "exported", no_dist=True)  # type: ignore[attr-defined]
    assert [key for key, value in wanted.items() if not is_same(value, loaded["optimizer"][key])] == []


def test_parameter_that_is_dropped_is_in_no_group(tmp_path: Path) -> None:
    model = new_model(0)
    optimizer = two_groups(model)
    train(model, optimizer, 0)
    saved, norm = flattened(model, optimizer), "model.norm.weight"
    for state in saved.values():
        state |= {key.replace(norm, "value.bias"): value for key, value in state.items() if norm in key}
    drop = ("--layout", "pp=2", "--drop", "value", "--out", tmp_path / "packed")
    run("pack", save(tmp_path / "step-2", "llama", saved), *drop)
    groups = json.loads((tmp_path / "packed" / "manifest.json").read_text())["training"]["optimizer"]["groups"]
    assert groups[1]["fqns"] == sorted(name for name, one in model.named_parameters() if one.dim() == 1)
    run("export", tmp_path / "packed", "--to", "megatron", "--out", tmp_path / "megatron")  # whose groups are by shape
    saved["optimizer"] = {key: value for key, value in saved["optimizer"].items() if "value.bias" in key}
    source = save(tmp_path / "alone", "llama", saved)
    assert refusal("pack", source, *drop[:-1], tmp_path / "out").found[1] == "source.bad-optimizer-state"


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("make", [muon_and_adamw, sgd_and_adafactor, amsgrad_and_adam, sgd_alone])
@pytest.mark.parametrize("options", [FLAT, StateDictOptions()])
def test_groups_of_unlike_classes_go_there_and_back(
    make: Callable[[Model], Optimizers], options: StateDictOptions, tmp_path: Path
) -> None:
    model, counts = new_model(0), {"train_state": {"step": 2, "ntokens_seen": 32}}
    optimizers = make(model)
    train(model, optimizers, 0)
    weights, state = get_state_dict(model, optimizers, options=options)
    source = save(tmp_path / "step-2", "llama", {"model": weights, "optimizer": state, **counts})
    pack(source, tmp_path / "packed", "pp=2")
    pack(tmp_path / "packed", tmp_path / "again", "pp=3")
    assert reshard("verify", tmp_path / "again").code == 0
    shape = model_shape(json.loads((tmp_path / "again" / "config.json").read_text()), "config.json")
    stored = decode_manifest((tmp_path / "again" / "manifest.json").read_bytes()).training
    assert stored is not None
    assert stored.optimizer is not None
    plan = declare_kinds(optimizer_of(OptimOptions(), shape, stored.optimizer), shape)
    check_state_fits(plan, stored.optimizer, shape, "a run that resumes")
    run("export", tmp_path / "again", "--to", "dcp", "--out", tmp_path / "exported")
    other = new_model(1)
    resumed = make(other)
    weights, state = get_state_dict(other, resumed, options=FLAT)
    loaded: Options = {**weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path / "exported", no_dist=True)  # type: ignore[attr-defined]
    saved = loaded.pop("optimizer")
    set_state_dict(other, resumed, model_state_dict=loaded, optim_state_dict=saved, options=FLAT)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert [group["lr"] for optimizer in resumed for group in optimizer.param_groups] == pytest.approx(rates, rel=1e-15)
    for group, trained in zip(groups_in(resumed), groups_in(optimizers), strict=True):
        group.update({key: trained[key] for key in ("foreach", "fused", "lr") if key in trained})
        assert {**group, "params": 0, "initial_lr": 0} == {**trained, "params": 0, "initial_lr": 0}
    assert train(other, resumed, 5) == train(model, optimizers, 5)
    first, second = (get_state_dict(of, by, options=FLAT) for of, by in ((model, optimizers), (other, resumed)))
    for expected, found in zip(first, second, strict=True):
        assert [name for name in expected if not is_same(expected[name], found[name])] == []
    run("pack", tmp_path / "exported", "--layout", "pp=3", "--out", tmp_path / "repacked")
    assert reshard("diff", tmp_path / "again", tmp_path / "repacked").code == 0


def test_step_counts_of_parameters_without_gradients_go_there_and_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The MLP of layer 1 had no gradient in the last step, the norm in the first two."""
    model = new_model(0)
    optimizer = one_group(model)
    for step in range(3):
        tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(step))
        model(tokens, labels=tokens).loss.backward()
        for name, parameter in model.named_parameters():
            if (step == 2 and "layers.1.mlp" in name) or (step < 2 and name == "model.norm.weight"):
                parameter.grad = None
        optimizer.step()
        model.zero_grad()
    saved = flattened(model, optimizer)
    source = save(tmp_path / "step-3", "llama", {**saved, "train_state": {"step": 3, "ntokens_seen": 48}})
    run("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed")
    run("pack", tmp_path / "packed", "--layout", "pp=3", "--out", tmp_path / "again")
    counts = {f"model.layers.1.mlp.{part}_proj.weight": 2 for part in ("gate", "up", "down")}
    assert decode_steps((tmp_path / "again" / STEPS_NAME).read_bytes(), "") == {**counts, "model.norm.weight": 1}
    run("export", tmp_path / "again", "--to", "dcp", "--out", tmp_path / "exported")
    loaded: Options = {"optimizer": {name: saved["optimizer"][name] for name in saved["optimizer"] if ".step" in name}}
    zeros = {name: torch.zeros_like(step) for name, step in loaded["optimizer"].items()}
    read: Options = {"optimizer": zeros}
    dcp.load(read, checkpoint_id=tmp_path / "exported", no_dist=True)  # type: ignore[attr-defined]
    assert {name: int(step) for name, step in zeros.items()} == {
        name: int(step) for name, step in loaded["optimizer"].items()
    }
    run("pack", tmp_path / "exported", "--layout", "pp=2", "--out", tmp_path / "repacked")
    assert (tmp_path / "repacked" / STEPS_NAME).read_bytes() == (tmp_path / "again" / STEPS_NAME).read_bytes()
    export(tmp_path / "again", tmp_path / "universal", to="universal")
    warnings = [record.args for record in caplog.records if record.name == "reshard.formats.export"]
    assert [args[1] for args in warnings if isinstance(args, tuple)] == [4]


@pytest.mark.parametrize(("rates", "expected"), [((0.005, 0.005, 0.01), 0.005), ((0.005, 0.01, 0.01), None)])
def test_rates_of_groups_are_one_where_they_follow_one_schedule(
    rates: tuple[float, ...], expected: float | None, tmp_path: Path
) -> None:
    model = new_model(0)
    optimizers = muon_and_adamw(model)
    train(model, optimizers, 0)
    (muon,), (others, norms) = (optimizer.param_groups for optimizer in optimizers)
    for group, rate in zip((others, norms, muon), rates, strict=True):
        group |= {"initial_lr": group["lr"], "lr": rate}
    weights, state = get_state_dict(model, optimizers, options=FLAT)
    saved = {"model": weights, "optimizer": state, "train_state": {"step": 2, "ntokens_seen": 32}}
    pack(save(tmp_path / "step-2", "llama", saved), tmp_path / "packed", "pp=2")
    training = decode_manifest((tmp_path / "packed" / "manifest.json").read_bytes()).training
    assert training is not None
    assert (training.learning_rate and training.learning_rate.peak) == expected


@pytest.mark.parametrize("form", [nested, flattened])
@pytest.mark.parametrize("rate", [torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)])
def test_learning_rate_that_is_a_tensor_is_its_number(
    rate: torch.Tensor, form: Callable[..., Options], tmp_path: Path
) -> None:
    saved_by(lambda model: torch.optim.AdamW(model.parameters(), rate), form)(tmp_path / "step-2")
    pack(tmp_path / "step-2", tmp_path / "packed")
    manifest = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    assert manifest["training"]["learning_rate"]["peak"] == 0.25
    assert not manifest["source"].get("left_out")


def groups_in(optimizers: Optimizers) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


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
    "steps that nothing counts": saved_by(of(torch.optim.SGD, momentum=0.9), nested),
    "epochs, and no steps": saved_by(of(torch.optim.SGD, momentum=0.9), with_epochs),
    "an option that is no number": changed(lambda state: state["param_groups"][0].update(maximize=float("nan"))),
    "a rate of two numbers": changed(lambda state: state["param_groups"][0].update(lr=torch.ones(2))),
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


def test_state_that_two_matrices_of_stacked_experts_share_is_refused(tmp_path: Path) -> None:
    """Adafactor's `col_var` of (experts, 2 F, D) is (experts, 1, D), a mean over the rows of both."""
    model: Model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"])  # type: ignore[no-untyped-call]
    optimizer = torch.optim.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    source = save(tmp_path / "step-1", "qwen3_moe", nested(model, optimizer))
    args = ("pack", source, "--layout", "pp=2", "--out", tmp_path / "out")
    assert refusal(*args).found[:2] == (3, "source.bad-optimizer-state")
    run(*args, "--drop", "optimizer")
