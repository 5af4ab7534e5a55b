"""A config.json alone of the catalogue's architectures, against models that transformers builds on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from manifests.models import model_shape
from manifests.models.shape import StoredTensors
from reshard.estimate.meta_model import build
from tests.builders import refusal, run
from tests.fast.manifests.models.catalogued import DOZEN, quiet, stored_by
from tests.fast.manifests.models.published import PUBLISHED

FEW = ("DeepSeek-V3.2", "Qwen3.5-397B-A17B, text")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in PUBLISHED]
)
def test_parameters_of_published_models_equal_those_of_transformers(name: str) -> None:
    config = plain(PUBLISHED[name])
    with quiet():
        whole, tensors = build(config["architectures"][0], config)
    shape = model_shape({**whole, **config}, stored=StoredTensors(tensors=tensors, where="config.json"))
    assert shape.num_params == count_params(config)


@pytest.mark.parametrize("architecture", DOZEN)
def test_names_and_shapes_by_config_equal_those_of_files(architecture: str) -> None:
    for changes in ({}, {"tie_word_embeddings": False}):
        config, stored = stored_by(architecture, **changes)
        with quiet():
            assert build(architecture, config)[1] == stored.tensors


@pytest.mark.usefixtures("forked_build")
def test_plan_of_a_config_alone_counts_every_parameter(tmp_path: Path) -> None:
    """Fields that name code do not reach transformers."""
    config = {**PUBLISHED["GLM-4.5-Air"], "attn_implementation": "some-org/kernel@main", "auto_map": {"A": "b--c.D"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = run("plan", tmp_path / "config.json", "--layout", "balance:params,pp=4", "--json")
    assert sum(stage["params"] for stage in ended.json["stages"]) == count_params(PUBLISHED["GLM-4.5-Air"])
    assert ended.json["assumed"]["work"] == "estimated"


@pytest.mark.usefixtures("forked_build")
@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("hidden_size", "wide", "config.not-buildable"),
        ("num_hidden_layers", 10**9, "config.too-large"),
        ("n_routed_experts", 10**9, "config.too-large"),
        ("num_hidden_layers", 0, "config.invalid-field"),
    ],
)
def test_fields_that_no_model_can_have_are_refused(field: str, value: object, code: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["GLM-4.5-Air"], field: value}))
    assert refusal("plan", tmp_path / "config.json", "--layout", "pp=2").found[:2] == (3, code)


def test_without_torch_or_transformers_the_hint_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["GLM-4.5-Air"]))
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "transformers.py").write_text("raise ModuleNotFoundError('absent', name='transformers')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "absent"))
    refused = refusal("plan", tmp_path / "config.json", "--layout", "pp=2")
    assert refused.found == (3, "config.needs-weights", f"{tmp_path}/config.json: architectures")
    assert "transformers is not installed" in refused.text


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "quantization_config"}


def count_params(config: Mapping[str, Any]) -> int:
    """Return the parameters of the model that transformers builds from a config."""
    model_class = getattr(transformers, config["architectures"][0])
    fields = {name: value for name, value in plain(config).items() if name != "architectures"}
    with quiet(), torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(fields))
    return sum(parameter.numel() for parameter in model.parameters())
