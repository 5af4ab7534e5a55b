"""`runner.save_stages` in one process: what it writes equals what was loaded, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

import reshard
import runner
from manifests.errors import UserError
from manifests.optimizer_state import GroupNumbers
from tests.builders import reshard as command
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.tiny import load_model, save_model


@pytest.fixture(autouse=True)
def flags_in_errors() -> None:
    """Leave the names of parameters in errors."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model(folder / "model", tie_word_embeddings=True)
    reshard.pack(folder / "model", folder / "pp1", "pp=1")
    return folder


@pytest.fixture
def model(place: Path) -> nn.Module:
    return load_model(place / "model")


def trained(model: nn.Module, groups: Any = None, **options: Any) -> torch.optim.AdamW:
    """Return an optimizer that has taken one step."""
    optimizer = torch.optim.AdamW(groups or model.parameters(), **options)
    model(torch.arange(8).view(1, 8)).logits.float().square().mean().backward()
    optimizer.step()
    return optimizer


def test_saved_module_exports_to_the_bytes_that_were_loaded(place: Path, model: nn.Module, tmp_path: Path) -> None:
    names = {f"mine.{name}": name for name in model.state_dict()}

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mine = model

    nbytes = runner.save_stages(place / "pp1", 0, Mine(), tmp_path / "out", step=0, name_of=names.__getitem__)
    manifest = reshard.open(tmp_path / "out").manifest
    assert (nbytes, manifest.training.optimizer) == (sum(shard.nbytes for shard in manifest.shards), None)
    assert command("export", tmp_path / "out", "--to", "hf", "--out", tmp_path / "hf").code == 0
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (place / "model" / "model.safetensors").read_bytes()


def test_groups_of_the_optimizer_are_those_that_a_run_resumes(place: Path, model: nn.Module, tmp_path: Path) -> None:
    bare = [weight for weight in model.parameters() if weight.dim() == 1]
    others = [weight for weight in model.parameters() if weight.dim() > 1]
    groups = [{"params": bare, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
    optimizer = trained(model, groups, lr=2e-3, betas=(0.9, 0.95))
    runner.save_stages(place / "pp1", 0, model, tmp_path / "out", step=1, optimizer=optimizer, max_norm=1.0)
    training = reshard.open(tmp_path / "out").manifest.training
    first, second = training.optimizer.groups
    assert (first.weight_decay, first.beta2, first.fqns, second.weight_decay) == (0.1, 0.95, (), 0.0)
    assert set(second.fqns) == {name for name, weight in model.named_parameters() if weight.dim() == 1}
    assert (training.learning_rate.peak, training.optimizer.max_norm, training.dtype) == (2e-3, 1.0, "F32")


@pytest.mark.parametrize("rates", [(1e-4, 1e-3), (1e-3, 0.0), (0.0, 1e-3), (0.0, 0.0)])
def test_each_group_keeps_its_learning_rate(
    place: Path, model: nn.Module, tmp_path: Path, rates: tuple[float, float]
) -> None:
    embedding = model.get_parameter("model.embed_tokens.weight")
    others = [weight for weight in model.parameters() if weight is not embedding]
    optimizer = trained(
        model, [{"params": [embedding], "lr": rates[0]}, {"params": others, "lr": rates[1]}], weight_decay=0.1
    )
    runner.save_stages(place / "pp1", 0, model, tmp_path / "out", step=1, optimizer=optimizer)
    training = reshard.open(tmp_path / "out").manifest.training
    numbers, fqn_of = GroupNumbers(training.optimizer.groups), {id(at): name for name, at in model.named_parameters()}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            factor = training.optimizer.groups[numbers.of(fqn_of[id(weight)])].rate_factor
            assert training.learning_rate.peak * (1 if factor is None else factor) == pytest.approx(group["lr"])


@pytest.mark.parametrize(
    ("optimizer_of", "step"),
    [
        (lambda model: torch.optim.SGD(model.parameters()), 1),
        (lambda model: torch.optim.AdamW(model.parameters()), 0),
        (lambda model: trained(model, amsgrad=True), 1),
        (lambda model: trained(model, maximize=True), 1),
        (trained, 2),
    ],
    ids=["sgd", "no-state", "amsgrad", "maximize", "other-step"],
)
def test_optimizer_that_no_run_could_resume_is_refused(
    place: Path, model: nn.Module, tmp_path: Path, optimizer_of: Callable[[nn.Module], Any], step: int
) -> None:
    with pytest.raises(UserError) as error:
        runner.save_stages(place / "pp1", 0, model, tmp_path / "out", step=step, optimizer=optimizer_of(model))
    assert (error.value.code, error.value.where) == ("checkpoint.unsupported-optimizer", "rank 0: optimizer")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM"])
def test_what_a_model_keeps_in_float32_does_not_count_as_the_dtype_of_training(
    tmp_path: Path, architecture: str
) -> None:
    save_tiny(tmp_path / "model", architecture)
    reshard.pack(tmp_path / "model", tmp_path / "pp1", "pp=1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16, torch.float32}
    runner.save_stages(tmp_path / "pp1", 0, model, tmp_path / "out", step=1, adapter=OfTransformers(model))
    assert reshard.open(tmp_path / "out").manifest.training.dtype == "BF16"


class OfTransformers:
    """An adapter that splits stacks of experts as transformers does when it saves."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def to_hf(self, state_dict: dict[str, Any], /) -> dict[str, Any]:
        return dict(revert_weight_conversion(self.model, state_dict))

    def from_hf(self, hf_state_dict: dict[str, Any], /) -> dict[str, Any]:
        raise NotImplementedError


def test_modules_of_another_model_are_refused(place: Path, model: nn.Module, tmp_path: Path) -> None:
    def refusal(
        rank: int = 0, module: nn.Module = model, name_of: Callable[[str], str] | None = None
    ) -> tuple[str, str]:
        with pytest.raises(UserError) as error:
            runner.save_stages(place / "pp1", rank, module, tmp_path / "out", step=0, name_of=name_of)
        assert list(tmp_path.iterdir()) == []
        return error.value.code, error.value.where.removeprefix("rank 0: ").partition(":")[0]

    assert refusal(rank=1) == ("options.no-such-rank", "rank")
    assert refusal(name_of=lambda name: name.removeprefix("model."))[0] == "model.unexpected-parameter"
    model.get_submodule("model.norm").weight = nn.Parameter(torch.ones(3))
    assert refusal() == ("model.wrong-shape", "model")
    del model.get_submodule("model.norm").weight
    assert refusal()[0] == "model.missing-parameter"


@pytest.mark.parametrize("models", [2, 0])
def test_two_modules_of_one_name_and_no_module_are_refused(
    models: int, place: Path, model: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        runner.save_stages(place / "pp1", 0, [model] * models, tmp_path / "out", step=0)
    assert caught.value.code == ("model.duplicate-parameter" if models else "model.missing-parameter")
    assert not (tmp_path / "out").exists()


def test_address_is_no_folder_to_save_to(
    place: Path, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        runner.save_stages(place / "pp1", 0, model, "s3://bucket/out", step=0)
    assert (error.value.code, error.value.where) == ("options.invalid-value", "rank 0: out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "value"), [("step", 1.5), ("step", -1), ("num_tokens", 2.0)])
def test_what_no_manifest_may_count_is_refused_before_anything_is_written(
    name: str, value: float, place: Path, model: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        runner.save_stages(place / "pp1", 0, model, tmp_path / "out", **{"step": 0, name: value})
    assert (error.value.code, error.value.where) == ("options.invalid-value", f"rank 0: {name}")
    assert list(tmp_path.iterdir()) == []


def test_integers_of_numpy_are_counts(place: Path, model: nn.Module, tmp_path: Path) -> None:
    runner.save_stages(place / "pp1", 0, model, tmp_path / "out", step=np.int64(3), num_tokens=np.int32(7))
    training = reshard.open(tmp_path / "out").manifest.training
    assert (training.step, training.num_tokens) == (3, 7)


def test_names_come_from_an_adapter_or_a_function(place: Path, model: nn.Module, tmp_path: Path) -> None:
    names = {"name_of": str, "adapter": ReversedRows()}
    with pytest.raises(UserError) as saving:
        runner.save_stages(place / "pp1", 0, model, tmp_path / "out", step=0, **names)
    with pytest.raises(UserError) as loading:
        runner.load_stages(place / "pp1", 0, model, **names)
    assert (saving.value.code, loading.value.code, loading.value.where) == (*["options.conflict"] * 2, "name_of")


class ReversedRows:
    """An adapter that reads values: the module has the rows of a table in another order than files."""

    def to_hf(self, state_dict: dict[str, Any], /) -> dict[str, Any]:
        table = state_dict.get("model.embed_tokens.weight")
        rows = {} if table is None else {"model.embed_tokens.weight": table[torch.arange(len(table)).flip(0)]}
        return {**state_dict, **rows}

    def from_hf(self, hf_state_dict: dict[str, Any], /) -> dict[str, Any]:
        return self.to_hf(hf_state_dict)


def test_adapter_converts_no_shards_of_parameters(place: Path, model: nn.Module, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = trained(model)
        runner.save_stages(
            place / "pp1", 0, model, tmp_path / "out", step=1, optimizer=optimizer, adapter=ReversedRows()
        )
        (group,) = reshard.open(tmp_path / "out").manifest.training.optimizer.groups
    finally:
        dist.destroy_process_group()
    assert group.weight_decay == optimizer.param_groups[0]["weight_decay"]
