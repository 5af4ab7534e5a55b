"""Sizes of tensors by config.json alone, against models that transformers builds on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from manifests.errors import UserError
from manifests.models import model_shape
from manifests.models.sizes import sizes_of, tensors_of
from tests.builders import run
from tests.fast.models.catalogued import DOZEN, check_table, quiet, stored_by
from tests.fast.models.published import PUBLISHED

FITTED = tuple(name for name in DOZEN if sizes_of(name) is not None)  # the check of all draws more configs of each


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_equal_those_of_transformers(name: str) -> None:
    config = dict(PUBLISHED[name])
    shape = model_shape(config)
    assert shape.num_params == count_params(config)


@pytest.mark.parametrize("architecture", FITTED)
def test_names_and_shapes_by_config_equal_those_of_files(architecture: str) -> None:
    sizes = sizes_of(architecture)
    assert sizes is not None
    for changes in ({}, {"vocab_size": 104}, {"tie_word_embeddings": False}):
        config, stored = stored_by(architecture, **changes)
        found = tensors_of(sizes, config, "config.json")
        tied = found.keys() - stored.tensors.keys()
        assert {name: shape for name, shape in found.items() if name not in tied} == stored.tensors
        assert not tied or config["tie_word_embeddings"]


def test_layers_of_several_kinds_follow_the_config() -> None:
    config = {**PUBLISHED["Qwen3-Next-80B-A3B"], "num_hidden_layers": 6, "full_attention_interval": 3}
    config |= {"num_experts": 2, "mlp_only_layers": [1]}
    names = model_shape(config).tensors
    attention = [number for number in range(6) if f"model.layers.{number}.self_attn.q_proj.weight" in names]
    dense = [number for number in range(6) if f"model.layers.{number}.mlp.gate_proj.weight" in names]
    assert (attention, dense) == ([2, 5], [1])


def test_plan_of_a_config_alone_counts_every_parameter(tmp_path: Path) -> None:
    config = dict(PUBLISHED["GLM-4.5-Air"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = run("plan", tmp_path / "config.json", "--layout", "balance:params,pp=4", "--json")
    assert sum(stage["params"] for stage in ended.json["stages"]) == count_params(config)
    assert ended.json["assumed"]["work"] == "estimated"


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("hidden_size", "wide", "config.invalid-field"),
        ("hidden_size", 0, "config.inconsistent-fields"),
        ("hidden_size", 1 << 60, "config.invalid-field"),
        ("num_hidden_layers", 10**9, "config.too-large"),
        ("n_routed_experts", 10**9, "config.too-large"),
        ("num_hidden_layers", 0, "config.invalid-field"),
    ],
)
def test_fields_that_no_model_can_have_are_refused(field: str, value: object, code: str) -> None:
    with pytest.raises(UserError) as caught:
        model_shape({**PUBLISHED["GLM-4.5-Air"], field: value})
    assert caught.value.code == code


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "names", [("MiniMaxM2ForCausalLM",), pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_sizes_hold_for_models_of_other_configs(names: tuple[str, ...]) -> None:
    from tools import sizes

    assert check_table(sizes.main, *names) == 0


def count_params(config: Mapping[str, Any]) -> int:
    """Return the parameters of the model that transformers builds from a config."""
    model_class = getattr(transformers, config["architectures"][0])
    fields = {name: value for name, value in config.items() if name not in ("architectures", "quantization_config")}
    with quiet(), torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(fields))
    return sum(parameter.numel() for parameter in model.parameters())
