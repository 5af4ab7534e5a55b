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
from manifests.module_times import ModuleTime, parse_times
from reshard.estimate.costs import costs_of, times_of
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
        ({"step": {"overhead_s": 0.1, "num_params": 1, "latency_s": -1}}, "times.json: step.latency_s"),
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
