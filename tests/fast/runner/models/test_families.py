"""What a family builds, what it calls things, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manifests.errors import InputError
from runner.models import family_for
from runner.models.titan_modules import compile_later

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


def test_rotary_cache_holds_the_training_length_in_float32() -> None:
    family = family_for(LLAMA, max_seq_len=6)
    stage = family.build(("model.layers.3",)).to(torch.bfloat16).to_empty(device="cpu")
    family.init_buffers(stage, torch.device("cpu"))
    caches = dict(stage.named_buffers())
    assert [(tuple(cache.shape), cache.dtype) for cache in caches.values()] == [((6, 8), torch.float32)]
    assert all(torch.equal(cache[0], torch.tensor([1.0] * 4 + [0.0] * 4)) for cache in caches.values())


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (
            {"attention_bias": True},
            "config.json: attention_bias",
        ),
        ({"mlp_bias": True}, "config.json: mlp_bias"),
        (
            {"hidden_act": "gelu"},
            "config.json: hidden_act",
        ),
        ({"pretraining_tp": 2}, "config.json: pretraining_tp"),
        (
            {"attention_dropout": 0.1},
            "config.json: attention_dropout",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "config.json: rope_scaling.rope_type",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "config.json: rope_parameters.rope_type",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": -8, "original_max_position_embeddings": 8}},
            "config.json: rope_parameters.factor",
        ),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 1.0}},
            "config.json: rope_scaling.high_freq_factor",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 9.0}}},
            "config.json: rope_parameters.full_attention",
        ),
        ({"rope_scaling": "llama3"}, "config.json: rope_scaling"),
        (
            {"partial_rotary_factor": 0.5},
            "config.json: partial_rotary_factor",
        ),
        ({"rope_theta": True}, "config.json: rope_theta"),
        ({"rms_norm_eps": 0}, "config.json: rms_norm_eps"),
        ({"head_dim": 5}, "config.json: head_dim"),
        (
            {"architectures": ["BertModel"]},
            "config.json: architectures",
        ),
        ({"vocab_size": None}, "config.json: vocab_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_field_that_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], where: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(InputError) as error:
        family_for({**LLAMA, **fields}, max_seq_len=8)
    assert error.value.where == where
    wording(f"{error.value.code}: {error.value}")


@pytest.mark.parametrize(
    ("module", "absent"),
    [("runner.config.schema", "torch"), ("runner.models", "torchtitan"), ("runner.training.step", "torchtitan")],
)
def test_import_brings_in_no_more_than_needed(module: str, absent: str) -> None:
    script = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_model_on_torchtitans_modules_imports_neither_transformers_nor_inductor() -> None:
    script = "import json, sys, runner.models; runner.models.family_for(json.loads(sys.argv[1]), max_seq_len=8); "
    script += "sys.exit(str({'transformers', 'torch._inductor.compile_fx'} & set(sys.modules) or ''))"
    ended = subprocess.run(
        [sys.executable, "-c", script, json.dumps({**LLAMA, "model_type": "llama"})],
        timeout=120,
        check=False,
        capture_output=True,
    )
    assert ended.stderr.strip() == b""


def test_torchtitans_attention_is_compiled_when_it_is_called() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    later = compile_later(lambda tensor: tensor + 1, backend=backend)
    assert graphs == []
    assert [int(later(torch.tensor(number))) for number in (1, 2)] == [2, 3]
    assert len(graphs) == 1
