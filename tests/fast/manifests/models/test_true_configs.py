"""Public models: their published sizes, from their configs alone."""

from __future__ import annotations

from math import prod

import pytest

from manifests.models import model_shape
from tests.fast.manifests.models.built import TRUE, TRUE_DECODERS, build, read_config
from tests.steps import steps_of

# Totals of the models' safetensors files, as the hub shows them; gpt-oss's as unpacked (117B on its model card).
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gpt2": 137_022_720 - 12 * 1024 * 1024,  # the file's causal masks are no parameters
    "falcon-7b": 7_217_189_760 - 65_024 * 4_544,  # the file stores the tied head too
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    assert model_shape(read_config(name)).num_params == PUBLISHED[name]


def test_deepseek_v3_is_671_billion_and_its_mtp_layer_the_rest() -> None:
    shape = model_shape(read_config("deepseek-v3"))
    main = shape.without(shape.optional)
    routing_biases = sum(prod(dims) for fqn, dims in main.tensors.items() if fqn.endswith("e_score_correction_bias"))
    # The published count takes the router's 58 x 256 biases for parameters; transformers has them as buffers.
    assert main.num_params + routing_biases == 671_026_419_200
    # README_WEIGHTS.md: 11.5B of its own, 0.9B embedding, 0.9B head.
    assert f"{(shape.num_params - main.num_params) / 1e9:.1f}" == "13.5"


@pytest.mark.parametrize("name", TRUE + TRUE_DECODERS)
def test_parameters_are_those_that_transformers_builds(name: str) -> None:
    shape = model_shape(read_config(name))
    config = {key: value for key, value in read_config(name).items() if key != "quantization_config"}
    config["architectures"] = [shape.architecture]
    model = build(config, "meta")
    assert shape.without(shape.optional).num_params == sum(parameter.numel() for parameter in model.parameters())


def test_deepseek_v3_has_the_91991_tensors_and_689_gb_of_its_index_and_is_built_in_few_steps() -> None:
    config = read_config("deepseek-v3")
    shape = model_shape(config)
    assert len(shape.tensors) == 91_991
    assert steps_of(lambda: model_shape(config)) < 5 * 91_991
    scales = {fqn for fqn in shape.tensors if fqn.endswith("_scale_inv")}
    nbytes = sum(
        prod(dims) * (4 if fqn in scales else 1 if f"{fqn}_scale_inv" in scales else 2)
        for fqn, dims in shape.tensors.items()
    )
    assert f"{nbytes / 1e9:.0f}" == "689"
    mtp = [fqn.removeprefix("model.layers.61.") for fqn in shape.tensors if fqn.startswith("model.layers.61.")]
    assert len(mtp) == 1564
    assert {
        "embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
        "shared_head.head.weight",
    } <= set(mtp)  # fmt: skip
    assert "eh_proj.weight_scale_inv" not in mtp
    assert shape.tensors["model.layers.61.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)


def test_gpt_oss_stores_its_experts_as_blocks_and_scales() -> None:
    shape = model_shape(read_config("gpt-oss-120b"))
    layer = {
        fqn.removeprefix("model.layers.0.mlp.experts."): dims
        for fqn, dims in shape.tensors.items()
        if fqn.startswith("model.layers.0.mlp.experts.")
    }
    assert layer == {
        "gate_up_proj_bias": (128, 5760),
        "gate_up_proj_blocks": (128, 5760, 90, 16),
        "gate_up_proj_scales": (128, 5760, 90),
        "down_proj_bias": (128, 2880),
        "down_proj_blocks": (128, 2880, 90, 16),
        "down_proj_scales": (128, 2880, 90),
    }
