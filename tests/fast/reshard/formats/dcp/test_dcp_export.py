"""Folders of torch.distributed.checkpoint as outputs; torch's reader and torchtitan's own classes are the oracle."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.distributed.flex_shard.dist_muon import DistMuon
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from tests.builders import (
    EMBEDDING,
    HEAD,
    llama_config,
    llama_shapes,
    pack,
    refusal,
    reshard,
    run,
    tensors_in,
    write_model,
)
from tests.fast.reshard.formats.dcp.test_dcp_source import CONFIGS, assert_equal, huggingface_state, torchtitan_state
from tests.fast.titans import LLAMA, llama
from tests.fast.trained import write_trained_head

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
Key = tuple[str, ...]
PROJECTIONS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


def state_of(folder: Path) -> dict[Key, Any]:
    """Return everything that a checkpoint has, by torch's own reader."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = dcp.FileSystemReader(folder)
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {
        (key, *inner): value
        for key, entry in state.items()
        for inner, value in ([((k,), one) for k, one in entry.items()] if isinstance(entry, dict) else [((), entry)])
    }


def assert_contains(found: Mapping[Key, Any], expected: Mapping[Key, Any]) -> None:
    """Fail unless every entry of `expected` is found, bit for bit."""
    assert expected.keys() <= found.keys()
    assert [key for key, value in expected.items() if not is_same(value, found[key])] == []


def is_same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(("names", "embedding"), [("hf", EMBEDDING), ("torchtitan", "tok_embeddings.weight")])
def test_torch_reads_a_tied_weight_under_each_name_from_one_place(names: str, embedding: str, tmp_path: Path) -> None:
    """State dicts have both names, and torch refuses a checkpoint without one of them."""
    source, packed, out = (tmp_path / name for name in ("source", "packed", "dcp"))
    tensors = write_model(source, llama_config(tie_word_embeddings=True))
    run("export", pack(source, packed), "--to", "dcp", "--for", names, "--out", out)
    found = state_of(out)
    assert len(found) == len(tensors) + 1
    assert torch.equal(found[HEAD,], found[embedding,])
    assert sum(path.stat().st_size for path in out.glob("*.distcp")) < sum(2048 + len(t.data) for t in tensors.values())
    for one, other in ((out, source), (source, out)):
        assert reshard("check", one, "--against", other, "--bytes").code == 0
    run("export", pack(out, tmp_path / "again"), "--to", "hf", "--out", tmp_path / "back")
    assert tensors_in(tmp_path / "back") == tensors


@pytest.mark.parametrize(("names", "embedding"), [("hf", EMBEDDING), ("torchtitan", "tok_embeddings.weight")])
def test_state_of_a_tied_weight_that_is_stored_as_the_head_is_the_embeddings(
    names: str, embedding: str, tmp_path: Path
) -> None:
    """Optimizers of torch know a parameter by the first of its names."""
    trained, weights, moments = write_trained_head(tmp_path)
    run("export", trained, "--to", "dcp", "--for", names, "--out", tmp_path / "out")
    found = state_of(tmp_path / "out")
    assert found[embedding,].numpy().tobytes() == found["lm_head.weight",].numpy().tobytes() == weights[HEAD].data
    for kind, tensors in moments.items():
        assert found["optimizer", f"state.{embedding}.{kind}"].numpy().tobytes() == tensors[HEAD].data
    assert not any("lm_head" in part for key in found if key[0] == "optimizer" for part in key)
    pack(tmp_path / "out", tmp_path / "again", "pp=2")
    assert reshard("diff", trained, tmp_path / "again").code == 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_torchtitan_reads_what_its_adapter_would_make_of_the_model(kind: str, tmp_path: Path) -> None:
    state = huggingface_state(kind, tmp_path / "model")
    run("pack", tmp_path / "model", "--layout", "pp=3", "--out", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "dcp", "--for", "torchtitan", "--out", tmp_path / "step-0")
    found = {key: tensor for (key,), tensor in state_of(tmp_path / "step-0").items()}
    zeros = [found.pop(name) for name in list(found) if name.endswith("expert_bias_E") and kind != "deepseek_v3"]
    assert all(torch.equal(one, torch.zeros(4)) for one in zeros)
    assert len(zeros) == (3 if kind in ("qwen3_moe", "gpt_oss") else 0)
    assert_equal(found, torchtitan_state(kind, state))
    run("pack", tmp_path / "step-0", "--layout", "pp=1", "--out", tmp_path / "again")
    assert_equal(load_file(tmp_path / "again" / "model-00001-of-00001.safetensors"), state)
    checked = reshard("check", tmp_path / "step-0")
    assert (checked.code, checked.err) == (0, "")


class MuonOptimizers(OptimizersContainer[Any]):
    """torchtitan's container with torch's Muon as its DistMuon, which has its options and state, and needs CUDA."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return torch.optim.Muon if name == "DistMuon" else OptimizersContainer._resolve_optimizer_factory(name)


class Titan:
    """The states that torchtitan's trainer saves, of a tiny Llama; `decays` are those of norms and of all else.

    With `muon`, the matrices of layers are trained as in torchtitan's recipe for Kimi K2.
    """

    config: Mapping[str, Any] = LLAMA

    def __init__(
        self, *, fused: bool, seed: int, decays: tuple[float, float] | None = None, muon: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.model = self.build(fused=fused)
        config = default_adamw(lr=0.01, weight_decay=0.02)
        if decays is not None:
            options = config.param_groups[0].optimizer_kwargs
            config.param_groups = [
                ParamGroupConfig(
                    pattern=each, optimizer_name="AdamW", optimizer_kwargs={**options, "weight_decay": decay}
                )
                for each, decay in zip((".*norm.*", ".*"), decays, strict=True)
            ]
        if muon:
            recipe = {"lr": 0.03, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", "fused": False}
            matrices = ParamGroupConfig(
                pattern=r"layers.*\.w(q|k|v|o|qkv|[123])\.weight$", optimizer_name="DistMuon", optimizer_kwargs=recipe
            )
            config.param_groups.insert(0, matrices)
        self.optimizers: OptimizersContainer[Any] = MuonOptimizers(config, model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=4, total_steps=10)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)
        self.counts = {"step": 0, "ntokens_seen": 0}

    def build(self, *, fused: bool) -> Any:
        model = llama(fused=fused).build()
        model.init_weights(buffer_device=None)
        return model

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizers.step()
            self.schedulers.step()
            self.counts = {"step": self.counts["step"] + 1, "ntokens_seen": self.counts["ntokens_seen"] + 32}

    def states(self) -> dict[str, Any]:
        weights = {name: tensor.detach().clone() for name, tensor in ModelWrapper(self.model).state_dict().items()}
        others = {"lr_scheduler": self.schedulers, "train_state": self.counts}
        return {**weights, "optimizer": self.optimizers, **others}

    def save(self, folder: Path) -> Path:
        data = {"dataloader": {"world_size": 2, "dp_rank_0": b"", "dp_rank_1": b""}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({**self.states(), **data}, checkpoint_id=folder, no_dist=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    def load(self, folder: Path) -> None:
        states = self.states()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(states, checkpoint_id=folder, no_dist=True)
        ModelWrapper(self.model).load_state_dict(states)
        self.counts = states["train_state"]


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_state_of_torchtitan_goes_there_and_back(fused: bool, tmp_path: Path) -> None:
    titan = Titan(fused=fused, seed=0)
    titan.train(3)
    source = titan.save(tmp_path / "step-3")
    packed = tmp_path / "packed"
    run("pack", source, "--layout", "pp=2", "--out", packed)
    manifest = json.loads((packed / "manifest.json").read_text())
    training = manifest["training"]
    assert manifest["source"]["left_out"] == ["dataloader"]
    assert (training["step"], training["num_tokens"], training["dtype"]) == (3, 192, "F32")
    assert training["learning_rate"]["peak"] == 0.01  # the last step of the warmup comes next
    (group,) = training["optimizer"]["groups"]
    assert group == {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.02, "fqns": []}
    run("export", packed, "--to", "dcp", "--for", "torchtitan", "--out", tmp_path / "again")
    expected = {key: value for key, value in state_of(source).items() if key[0] != "dataloader"}
    expected["train_state", "ntokens_seen"] *= 2  # of both data-parallel ranks
    assert_contains(state_of(tmp_path / "again"), expected)
    for other in (Titan(fused=fused, seed=1), Titan(fused=not fused, seed=1)):
        other.load(tmp_path / "again")
        assert_equal(other.model.state_dict(), titan.model.state_dict())
        assert (other.schedulers.state_dict(), other.counts["step"]) == ({"last_epoch": 3}, 3)
    run("pack", tmp_path / "again", "--layout", "pp=2", "--out", tmp_path / "repacked")
    files = {path.relative_to(packed) for path in packed.rglob("*.safetensors")}
    assert len(files) > 2  # with optimizer state
    for path in files:
        first, second = (load_file(folder / path) for folder in (packed, tmp_path / "repacked"))
        assert_equal(second, first)
    assert json.loads((tmp_path / "repacked" / "manifest.json").read_text())["training"] == training


@pytest.mark.parametrize("fused", [True, False])
def test_muon_of_torchtitan_goes_there_and_back(fused: bool, tmp_path: Path) -> None:
    assert inspect.signature(DistMuon).parameters.keys() >= inspect.signature(torch.optim.Muon).parameters.keys()
    titan = Titan(fused=fused, seed=0, muon=True)
    titan.train(3)  # after its warmup
    source = titan.save(tmp_path / "step-3")
    run("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed")
    optimizer = json.loads((tmp_path / "packed" / "manifest.json").read_text())["training"]["optimizer"]
    _, muon = optimizer["groups"]
    assert (optimizer["name"], muon["algorithm"], muon["rate_factor"]) == ("AdamW", "Muon", pytest.approx(3.0))
    assert muon["fqns"] == sorted(f"model.layers.*.{name}.weight" for name in PROJECTIONS)
    run("export", tmp_path / "packed", "--to", "dcp", "--for", "torchtitan", "--out", tmp_path / "again")
    expected = {key: value for key, value in state_of(source).items() if key[0] not in ("dataloader", "train_state")}
    assert_contains(state_of(tmp_path / "again"), expected)
    other = Titan(fused=fused, seed=1, muon=True)
    other.load(tmp_path / "again")
    for each in (titan, other):
        torch.manual_seed(7)
        each.train(2)
    assert_equal(other.model.state_dict(), titan.model.state_dict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of torchtitan's after one step, and beside it the export of its pack, `again`."""
    titan, place = Titan(fused=True, seed=0), tmp_path_factory.mktemp("titan")
    titan.train(1)
    run("pack", titan.save(place / "step-1"), "--layout", "pp=1", "--out", place / "packed")
    run("export", place / "packed", "--to", "dcp", "--for", "torchtitan", "--out", place / "again")
    return place


@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_optimizer_state_that_differs_in_its_fused_copy_is_refused(
    kind: str, change: str, trained: Path, tmp_path: Path
) -> None:
    state = state_of(trained / "again")
    key = "optimizer", f"state.layers.0.attention.qkv_linear.wk.weight.{kind}"
    if change == "value":
        state[key][0, 0] += 1
    else:  # the same bytes where all are zeros
        fused = "optimizer", f"state.layers.0.attention.qkv_linear.wqkv.weight.{kind}"
        state[key].zero_()
        state[fused].zero_()
        state[key] = state[key].T.contiguous() if change == "shape" else state[key].to(torch.bfloat16)
    nested: dict[str, Any] = {}
    for (name, *inner), value in state.items():
        nested |= {name: {**nested.get(name, {}), inner[0]: value}} if inner else {name: value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(nested, checkpoint_id=tmp_path / "two", no_dist=True)
    (tmp_path / "two" / "config.json").write_text(json.dumps(LLAMA))
    out = tmp_path / "repacked"
    ended = reshard("pack", tmp_path / "two", "--layout", "pp=1", "--out", out, "--json")
    assert ended.refusal[:2] == (3, "source.tensor-twice"), ended.err
    assert not out.exists()


def decays_of(titan: Titan) -> list[float]:
    return [group["weight_decay"] for group in titan.optimizers.optimizers[0].param_groups]


def test_two_parameter_groups_go_there_and_back(tmp_path: Path) -> None:
    titan = Titan(fused=True, seed=0, decays=(0.0, 0.02))
    titan.train(3)  # after its warmup
    run("pack", titan.save(tmp_path / "step-3"), "--layout", "pp=2", "--out", tmp_path / "packed")
    first, second = json.loads((tmp_path / "packed" / "manifest.json").read_text())["training"]["optimizer"]["groups"]
    assert (first["weight_decay"], first["fqns"]) == (0.02, [])  # all others: as the runner has it
    assert second["weight_decay"] == 0.0
    assert second["fqns"] == sorted(name for name in llama_shapes(LLAMA) if name.endswith("norm.weight"))
    run("export", tmp_path / "packed", "--to", "dcp", "--for", "torchtitan", "--out", tmp_path / "again")
    expected = {key: value for key, value in state_of(tmp_path / "step-3").items() if key[0] == "optimizer"}
    assert_contains(state_of(tmp_path / "again"), expected)
    other = Titan(fused=True, seed=1, decays=(0.5, 0.7))
    other.load(tmp_path / "again")
    assert decays_of(other) == [0.0, 0.02]


def test_trainer_with_two_groups_resumes_from_one(trained: Path) -> None:
    for saved in ("step-1", "again"):  # what torch does with its own is what it does with ours
        other = Titan(fused=True, seed=1, decays=(0.0, 0.5))
        other.load(trained / saved)
        assert decays_of(other) == [0.02, 0.02]


def test_universal_checkpoint_of_two_groups_is_refused(tmp_path: Path) -> None:
    """DeepSpeed's reader tells groups by their order in the trainer alone, which nobody knows here."""
    titan = Titan(fused=True, seed=0, decays=(0.0, 0.02))
    titan.train(1)
    run("pack", titan.save(tmp_path / "step-1"), "--layout", "pp=1", "--out", tmp_path / "packed")
    export = ("export", tmp_path / "packed", "--to", "universal", "--out", tmp_path / "out")
    exit_code, code, _ = refusal(*export).found
    assert (exit_code, code) == (3, "checkpoint.other-optimizer")
    run(*export, "--weights-only")


def test_moments_are_laid_out_as_the_weights_that_the_adapter_makes(tmp_path: Path) -> None:
    titan = Titan(fused=False, seed=0)
    titan.train(2)
    source = titan.save(tmp_path / "step-2")
    run("pack", source, "--layout", "pp=2", "--out", tmp_path / "packed")
    adapter: Any = Llama3StateDictAdapter(
        titan.model.config if hasattr(titan.model, "config") else llama(fused=False), None
    )
    saved = state_of(source)
    for holds in ("exp_avg", "exp_avg_sq"):
        names = [name for name in titan.model.state_dict() if ("optimizer", f"state.{name}.{holds}") in saved]
        native = {name: saved["optimizer", f"state.{name}.{holds}"] for name in names}
        found: dict[str, torch.Tensor] = {}
        for shard in sorted((tmp_path / "packed").glob(f"stage-*/{holds}/*.safetensors")):
            found |= load_file(shard)
        assert_equal(found, adapter.to_hf(native))


def drop_one(states: dict[str, Any]) -> None:
    states["optimizer"].pop("state.norm.weight.exp_avg_sq")


def step_elsewhere(states: dict[str, Any]) -> None:
    states["optimizer"]["state.norm.weight.step"] += 1


def count_otherwise(states: dict[str, Any]) -> None:
    states["train_state"] = {"step": 9, "ntokens_seen": 0}


def count_in_a_tensor(states: dict[str, Any]) -> None:
    states["train_state"] = {"step": torch.tensor(9), "ntokens_seen": 0}  # as torchtitan did once


def schedule_in_a_tensor(states: dict[str, Any]) -> None:
    states["lr_scheduler"] = {"last_epoch": torch.tensor(9)}


def lose_betas(states: dict[str, Any]) -> None:
    states["optimizer"]["param_groups.norm.weight.betas"] = 0.9


def list_betas(states: dict[str, Any]) -> None:
    states["optimizer"]["param_groups.norm.weight.betas"] = [[0.9], 0.95]


def count_without_end(states: dict[str, Any]) -> None:
    for name in states["optimizer"]:
        if name.endswith(".step"):
            states["optimizer"][name] += math.inf


def count_too_many_tokens(states: dict[str, Any]) -> None:
    states["train_state"] = {"step": 1, "ntokens_seen": 1 << 52}
    states["dataloader"] = {"world_size": 1 << 20}


def grow_weights(states: dict[str, Any]) -> None:
    states["optimizer"]["param_groups.norm.weight.weight_decay"] = -0.1


def decay_by_nothing_known(states: dict[str, Any]) -> None:
    states["optimizer"]["param_groups.norm.weight.weight_decay"] = math.nan


def divide_by_too_much(states: dict[str, Any]) -> None:
    states["optimizer"]["param_groups.norm.weight.eps"] = 10**400


@pytest.mark.parametrize(
    "change",
    [
        drop_one, step_elsewhere, count_otherwise, count_in_a_tensor, schedule_in_a_tensor, lose_betas,
        list_betas, count_without_end,
        count_too_many_tokens, grow_weights, decay_by_nothing_known, divide_by_too_much,
    ],
)  # fmt: skip
def test_optimizer_state_that_is_not_whole_is_refused_unless_it_is_dropped(change: Any, tmp_path: Path) -> None:
    titan = Titan(fused=True, seed=0)
    titan.train(1)
    states = {**titan.states(), "optimizer": titan.optimizers.state_dict()}
    change(states)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(states, checkpoint_id=tmp_path / "step-1", no_dist=True)
    (tmp_path / "step-1" / "config.json").write_text(json.dumps(LLAMA))
    pack = ("pack", tmp_path / "step-1", "--layout", "pp=1", "--out", tmp_path / "out")
    exit_code, code, _ = refusal(*pack).found
    assert (exit_code, code) == (3, "source.bad-optimizer-state")
    assert not (tmp_path / "out").exists()
    run(*pack, "--drop", "optimizer")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["training"] is None
