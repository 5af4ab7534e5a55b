"""Quantised checkpoints against the layers that transformers puts in, and against its dequantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from manifests.errors import InputError
from manifests.models import model_shape
from tests.fast.manifests.models.built import build, read_config

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [8, 16]}


@pytest.mark.parametrize("kept", [None, [], ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.2", "q_proj"]])
def test_fp8_scales_are_those_of_transformers_fp8_linear(kept: list[str] | None) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    config = read_config("tiny-qwen3", hidden_size=36)
    with torch.device("meta"):
        model = build(config, "meta")
        model = replace_with_fp8_linear(
            model,
            modules_to_not_convert=[*(kept or []), "lm_head"],  # transformers adds the head itself
            quantization_config=FineGrainedFP8Config(weight_block_size=(8, 16)),
        )
    shape = model_shape({**config, "quantization_config": {**FP8, "modules_to_not_convert": kept}})
    assert dict(shape.tensors) == {fqn: tuple(tensor.shape) for fqn, tensor in model.state_dict().items()}
    assert shape.num_params == model_shape(config).num_params


def test_fp8_leaves_router_and_mtp_projection_as_they_are() -> None:
    config = read_config("tiny-deepseek-v3", num_nextn_predict_layers=1)
    plain, shape = model_shape(config), model_shape({**config, "quantization_config": FP8})
    scaled = {fqn.removesuffix("_scale_inv") for fqn in shape.tensors.keys() - plain.tensors.keys()}
    alone = {fqn.rpartition("layers.4.")[2] for fqn, dims in plain.tensors.items() if len(dims) == 2} - {
        fqn.rpartition("layers.4.")[2] for fqn in scaled
    }
    assert {fqn for fqn in alone if not fqn.startswith("model.layers.")} == {
        "model.embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "eh_proj.weight", "embed_tokens.weight",
        "shared_head.head.weight",
    }  # fmt: skip
    assert shape.num_params == plain.num_params


def test_mxfp4_unpacks_to_the_parameters() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = read_config("tiny-gpt-oss")
    plain = model_shape(config)
    shape = model_shape({**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}})
    packed = [fqn.removesuffix("_blocks") for fqn in shape.tensors if fqn.endswith("_blocks")]
    assert len(packed) == 8
    assert plain.tensors.keys() - shape.tensors.keys() == set(packed)
    for fqn in packed:
        blocks, scales = (
            torch.zeros(shape.tensors[f"{fqn}{suffix}"], dtype=torch.uint8) for suffix in ("_blocks", "_scales")
        )
        assert tuple(convert_moe_packed_tensors(blocks, scales).shape) == plain.tensors[fqn]
        assert shape.count_params(f"{fqn}_blocks") == plain.count_params(fqn)
        assert shape.count_params(f"{fqn}_scales") == 0
    assert shape.num_params == plain.num_params


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    [
        ("tiny-llama", {"quantization_config": FP8},
         "quantization_config.quant_method"),
        ("tiny-qwen3", {"quantization_config": {"quant_method": "gptq"}},
         "quantization_config.quant_method"),
        ("tiny-qwen3", {"quantization_config": {}},
         "quantization_config.quant_method"),
        ("tiny-qwen3", {"quantization_config": "fp8"}, "quantization_config"),
        ("tiny-qwen3", {"quantization_config": {**FP8, "weight_block_size": None}},
         "quantization_config.weight_block_size"),
        ("tiny-qwen3", {"quantization_config": {**FP8, "weight_block_size": [128, "128"]}},
         "quantization_config.weight_block_size"),
        ("tiny-qwen3", {"quantization_config": {**FP8, "activation_scheme": "static"}},
         "quantization_config.activation_scheme"),
        ("tiny-qwen3", {"quantization_config": {**FP8, "modules_to_not_convert": ["model.layers.*.mlp"]}},
         "quantization_config.modules_to_not_convert"),
        ("tiny-qwen3", {"quantization_config": {**FP8, "modules_to_not_convert": "lm_head"}},
         "quantization_config.modules_to_not_convert"),
        ("tiny-gpt-oss", {"hidden_size": 48, "quantization_config": {"quant_method": "mxfp4"}},
         "quantization_config.quant_method"),
        ("tiny-deepseek-v3", {"moe_layer_freq": 2},
         "moe_layer_freq"),
        ("tiny-deepseek-v3", {"topk_method": "greedy"},
         "topk_method"),
        ("tiny-deepseek-v3", {"n_routed_experts": 20_000}, "n_routed_experts"),
        ("tiny-deepseek-v3", {"num_nextn_predict_layers": -1},
         "num_nextn_predict_layers"),
        ("tiny-deepseek-v3", {"first_k_dense_replace": None},
         "first_k_dense_replace"),
        ("tiny-qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("tiny-qwen3-moe", {"num_experts": None}, "num_local_experts"),
        ("tiny-qwen3-moe", {"mlp_only_layers": 1},
         "mlp_only_layers"),
        ("tiny-gpt-oss", {"num_key_value_heads": 3},
         "num_key_value_heads"),
    ],
)  # fmt: skip
def test_config_that_is_not_supported_is_refused_by_its_field(
    name: str, changes: dict[str, Any], where: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(InputError) as error:
        model_shape(read_config(name, **changes))
    assert error.value.where == f"config.json: {where}"
    wording(f"{error.value.code}: {error.value}")
