"""What a family builds, what it calls things, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

from manifests.errors import InputError, UserError
from runner.models import family_for
from runner.models.family import Family
from runner.models.generic import Generic
from tools.tiny_models import tiny_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"architectures": ["BertModel"]}, "architectures"),
        ({"vocab_size": None}, "vocab_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_field_that_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], where: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(InputError) as error:
        family_for({**LLAMA, **fields}, max_seq_len=8)
    assert error.value.where == f"config.json: {where}"
    wording(f"{error.value.code}: {error.value}")


def test_imports_bring_in_no_more_than_needed() -> None:
    script = (
        "import sys, runner.config.schema; assert 'torch' not in sys.modules; "
        "import runner.models, runner.training.step; assert 'torchtitan' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


# No field of a config chooses the code that ranks run: implementations, kernels of the hub, classes of other types.


# A hand-written decoder, one of the catalogue, one with experts, and one whose decoder is described in a section.
ARCHITECTURES = ("Qwen2ForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "LlavaForConditionalGeneration")
PLANTS: tuple[Mapping[str, Any], ...] = (
    *({"attn_implementation": name} for name in ("somebody/kernel@main", "flash_attention_2", "flex_attention",
                                                 "paged|eager", "nothing", 3, {"text_config": "somebody/kernel"})),
    {"_attn_implementation": "kernels-community/flash-attn"},
    {"_attn_implementation_internal": "somebody/kernel", "_attn_implementation_autoset": True},
    {"experts_implementation": "somebody/kernel"},
    {"_experts_implementation": "nothing"},
    {"auto_map": {"AutoModel": "somebody/else--modeling.Other"}, "_name_or_path": "somebody/else"},
    {"gradient_checkpointing": True},
    *({"dtype": value, "torch_dtype": value} for value in ("load", "nothing", 3, {"lm_head": "float16"})),
    {"use_kernels": True, "kernel_config": {"RMSNorm": "somebody/kernel"}},
)  # fmt: skip


def config_of(architecture: str) -> dict[str, Any]:
    model_class: type[PreTrainedModel] = getattr(transformers, architecture)
    config: dict[str, Any] = tiny_config(model_class).to_dict()
    return {**config, "architectures": [architecture]}


def implementations(family: Family) -> set[tuple[str, str, bool]]:
    """Return what the modules of a whole model, and of the self-check's, run."""
    built = [family.build(family.modules)]
    if isinstance(family, Generic):
        built += [family.tiny().build(family.tiny().modules), family.whole()]
    models = [part for module in built for part in module.modules() if isinstance(part, PreTrainedModel)]
    assert models
    return {
        (part.config._attn_implementation, part.config._experts_implementation, part.is_activation_checkpointing)
        for part in models
    }


@pytest.mark.parametrize(
    ("architecture", "plants"),
    [
        *((architecture, PLANTS[::5]) for architecture in ARCHITECTURES[:2]),
        *(pytest.param(architecture, PLANTS, marks=pytest.mark.slow) for architecture in ARCHITECTURES),
    ],
)
def test_ranks_run_the_same_code_whatever_a_config_names(
    architecture: str, plants: Sequence[Mapping[str, Any]]
) -> None:
    config = config_of(architecture)
    expected = implementations(family_for(config, max_seq_len=8))
    assert {attention for attention, _, _ in expected} <= {"sdpa", "eager"}
    assert not any(is_on for _, _, is_on in expected)
    for fields in plants:
        sections = {name: {**value, **fields} for name, value in config.items() if name.endswith("_config") and value}
        for planted in ({**config, **fields}, {**config, **sections}):
            assert implementations(family_for(planted, max_seq_len=8)) == expected, fields


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("LlamaForCausalLM", "gemma"), ("Olmo2ForCausalLM", "olmo"), ("GPT2LMHeadModel", "opt")],
)
def test_config_of_another_type_is_refused(architecture: str, model_type: str) -> None:
    """transformers chooses the class by `model_type`."""
    config = config_of(architecture)
    with pytest.raises(UserError) as refused:
        family_for({**config, "model_type": model_type}, max_seq_len=8)
    assert (refused.value.code, refused.value.where) == ("config.contradictory-fields", "config.json: model_type")
    family_for({**config, "model_type": "a type that transformers does not have"}, max_seq_len=8)
