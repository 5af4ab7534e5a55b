"""No field of a config chooses the code that ranks run: implementations, kernels of the hub, classes of other types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

from manifests.errors import UserError
from runner.models import family_for
from runner.models.family import Family
from runner.models.generic import Generic
from tools.tiny_models import tiny_config

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
