"""What modules cost: against packed bundles, and from measured times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from manifests.errors import InputError
from manifests.models import ModelShape, model_shape
from manifests.module_times import ModuleTime, parse_times, read_times
from reshard.estimate.costs import costs_of, times_of
from reshard.layouts import parse_layout
from reshard.layouts.model import inventory_of_modules
from tests.builders import run
from tests.fast.manifests.models.built import TINY, build, read_config

LLAMA = model_shape(read_config("tiny-llama"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_params_and_bytes_of_modules_add_up_to_those_of_packed_stages(name: str, tied: bool, tmp_path: Path) -> None:
    model = build(read_config(name, tie_word_embeddings=tied))
    model.model.norm.half()  # sizes come from the files, not from one dtype
    source, out = tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source)
    run("pack", source, "--layout", "pp=3", "--out", out, "--quiet", "--json")
    shape = model_shape(json.loads((source / "config.json").read_text()))
    with safe_open(source / "model.safetensors", "pt") as file:
        stored = {fqn: file.get_tensor(fqn).nbytes for fqn in file.keys()}  # noqa: SIM118
    costs = costs_of(shape, seq_len=8, nbytes=stored)
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    assert len(stages) == 3
    for stage in stages:
        assert sum(costs["bytes"][module] for module in stage["modules"]) == stage["nbytes"]
        assert sum(costs["params"][module] for module in stage["modules"]) == stage["num_params"]
    copies = shape.hidden_size * 96 if tied else 0
    assert sum(costs["params"].values()) == shape.num_params + copies


def test_every_cost_is_of_every_module_and_balances_a_layout() -> None:
    costs = costs_of(LLAMA, seq_len=8, nbytes=dict.fromkeys(LLAMA.tensors, 2))
    assert list(costs) == ["params", "bytes", "flops", "time"]
    assert all(list(cost) == list(LLAMA.modules) for cost in costs.values())
    inventory = inventory_of_modules(LLAMA.modules, LLAMA.num_layers)
    for name in costs:
        assert len(parse_layout(f"balance:{name},pp=2", inventory, costs=costs).stages) == 2


def test_time_is_three_forward_passes_of_flops_until_it_is_measured() -> None:
    costs = costs_of(LLAMA, seq_len=8, nbytes={})
    assert costs["time"] == {module: 3 * flops for module, flops in costs["flops"].items()}
    assert costs["time"]["model.embed_tokens"] == costs["time"]["model.norm"] == 0
    measured = {module: ModuleTime(forward=index, backward=0.5) for index, module in enumerate(LLAMA.modules)}
    assert costs_of(LLAMA, seq_len=8, nbytes={}, measured=measured)["time"] == {
        module: index + 0.5 for index, module in enumerate(LLAMA.modules)
    }
    assert list(times_of(LLAMA, 8, dict(reversed(measured.items())))) == list(LLAMA.modules)


def times_document(shape: ModelShape, **changes: Any) -> dict[str, Any]:
    modules = {module: {"forward_s": 0.25, "backward_s": 1} for module in shape.modules}
    return {"version": 1, "modules": modules, **changes}


def test_measured_times_are_read_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(times_document(LLAMA)))
    assert read_times(path).modules == {module: ModuleTime(forward=0.25, backward=1.0) for module in LLAMA.modules}
    with pytest.raises(InputError, match=r"cannot be read: No such file"):
        read_times(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"version": 2}, "times.json: version"),
        ({"version": None}, "times.json: version"),
        ({"version": True}, "times.json: version"),
        ({"modules": None}, "times.json: modules"),
        ({"modules": [1]}, "times.json: modules"),
        ({"modules": {"lm_head": 1}}, "times.json: modules['lm_head']"),
        ({"modules": {"lm_head": {"forward_s": 1}}},
         "times.json: modules['lm_head'].backward_s"),
        ({"modules": {"lm_head": {"forward_s": -1, "backward_s": 1}}},
         "times.json: modules['lm_head'].forward_s"),
        ({"modules": {"lm_head": {"forward_s": True, "backward_s": 1}}},
         "times.json: modules['lm_head'].forward_s"),
        ({"modules": {"lm_head": {"forward_s": 1e999, "backward_s": 1}}}, "times.json"),
        ({"modules": {"lm_head": {"forward_s": 10**400, "backward_s": 1}}},
         "times.json: modules['lm_head'].forward_s"),
        ({"step": {"overhead_s": 0.1, "num_params": 0}}, "times.json: step.num_params"),
        ({"step": {"overhead_s": 0.1, "num_params": 1, "nbytes_per_s": 0}}, "times.json: step.nbytes_per_s"),
    ],
)  # fmt: skip
def test_file_that_holds_no_times_is_refused(
    changes: dict[str, Any], where: str, wording: Callable[[str], None]
) -> None:
    text = json.dumps(times_document(LLAMA, **changes)).replace("Infinity", "1e999").encode()
    with pytest.raises(InputError) as error:
        parse_times(text, "times.json")
    assert error.value.where == where
    wording(f"{error.value.code}: {error.value}")


def test_times_of_another_model_are_refused(wording: Callable[[str], None]) -> None:
    measured = dict.fromkeys(LLAMA.modules, ModuleTime(forward=1, backward=1))
    with pytest.raises(InputError) as error:
        times_of(LLAMA, 8, {module: time for module, time in measured.items() if "layers.2" not in module})
    assert (error.value.code, error.value.where) == ("options.cost-modules", "--cost")
    wording(str(error.value))
    with pytest.raises(InputError) as error:
        times_of(LLAMA, 8, {**measured, "model.layers.4": ModuleTime(forward=1, backward=1)})
    assert (error.value.code, error.value.where) == ("options.cost-modules", "--cost")
    wording(str(error.value))
