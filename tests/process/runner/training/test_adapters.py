"""Adapters against peft in one process: logits, every gradient, two steps, and the folder that is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.process.runner.training.adapter_cases import LR, NORMAL, SLOW, STEPS, Case, batch_of, make
from tests.process.torchrun import launch

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # of peft
]
LIMITS = {"fp64": 1e-10, "fp32": 1e-6}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
SLOW_PARAMS = [pytest.param(case, marks=pytest.mark.slow, id=case.name) for case in SLOW]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    for case in NORMAL:
        make(case, place)
    launch(2, "runner/training/adapters_worker.py", place, "normal", timeout_s=400)
    return place


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("slow")
    for case in SLOW:
        make(case, place)
    for num_ranks in (1, 2, 4):
        launch(num_ranks, "runner/training/adapters_worker.py", place, "slow", timeout_s=400)
    return place


@pytest.mark.parametrize("case", [*(pytest.param(case, id=case.name) for case in NORMAL), *SLOW_PARAMS])
def test_adapters_train_as_peft_trains_them(case: Case, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue("slow_runs" if case in SLOW else "runs")
    ranks = [torch.load(case.folder(place, f"rank{rank}.pt")) for rank in range(case.num_ranks)]
    expected = train_peft(case, place)
    limit = LIMITS[case.dtype]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=limit)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=limit)
        assert rank["frozen gradients"] == 0
    for step in range(STEPS):
        found, gradients = set(), expected["gradients"][step]
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for fqn, offset, gradient in (item for rank in ranks for item in rank["gradients"][step]):
            whole = gradients[fqn]
            part = tuple(slice(low, low + size) for low, size in zip(offset, gradient.shape, strict=True))
            scale = whole.abs().max().item() if case.dtype == "fp64" else largest  # float32 rounds small ones more
            assert (gradient - whole[part]).abs().max() <= limit * scale, fqn
            found.add(fqn)
        assert found == gradients.keys()
    assert {fqn for rank in ranks for fqn in rank["stepped"]} == expected["gradients"][0].keys()


@pytest.mark.parametrize("case", [*(pytest.param(case, id=case.name) for case in NORMAL), *SLOW_PARAMS])
def test_peft_loads_the_folder_that_is_saved(case: Case, request: pytest.FixtureRequest) -> None:
    from peft import PeftModel

    place: Path = request.getfixturevalue("slow_runs" if case in SLOW else "runs")
    model = base_of(case, place)
    trained = PeftModel.from_pretrained(model, case.folder(place, "trained"))
    saved = load_file(case.folder(place, "trained") / "adapter_model.safetensors")
    weights = {name.replace(".default", ""): weight for name, weight in trained.named_parameters() if "lora_" in name}
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name].to(weight.dtype), weight) for name, weight in weights.items())
    stepped = train_peft(case, place)["weights"]
    for name, weight in saved.items():
        far = (weight - stepped[name.removeprefix("base_model.model.")]).abs().max().item()
        assert far <= LIMITS[case.dtype] * max(1, LR / LIMITS["fp32"] * 1e-2), name


@pytest.mark.parametrize("case", [*(pytest.param(case, id=case.name) for case in NORMAL), *SLOW_PARAMS])
def test_rank_that_saves_gets_no_messages_of_replicas(case: Case, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue("slow_runs" if case in SLOW else "runs")
    num_pipeline_ranks = int(case.layout.partition(",")[0].removeprefix("pp="))
    assert torch.load(case.folder(place, "rank0.pt"))["messages"] == [num_pipeline_ranks]


def base_of(case: Case, place: Path) -> Any:
    dtype = DTYPES[case.dtype]
    model = AutoModelForCausalLM.from_pretrained(case.folder(place, "model"), dtype=dtype)
    model.config._experts_implementation = "eager"
    return model


def train_peft(case: Case, place: Path) -> dict[str, Any]:
    """Take the steps of a case with peft and torch in this process."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(base_of(case, place), case.folder(place, "adapter"), is_trainable=True)
    model = model.to(DTYPES[case.dtype])
    trained = {name.removeprefix("base_model.model.").replace(".default", ""): weight
               for name, weight in model.named_parameters() if weight.requires_grad}  # fmt: skip
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        batch = batch_of(step)
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.05)
        result["losses"].append(loss.item())
        result["norms"].append(norm.item())
        result["gradients"].append({fqn: weight.grad.clone() for fqn, weight in trained.items()})
        optimizer.step()
    result["weights"] = {fqn: weight.detach().clone() for fqn, weight in trained.items()}
    return result
