"""Every field of every config: a stage follows it as transformers does, or it is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from manifests.errors import UserError
from runner.models import family_for
from tests.fast.manifests.models.built import DECODERS, TINY, read_config
from tests.fast.runner.launch.followed import by_stages, by_transformers, differences

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = (
    {"rope_type": "default", "rope_theta": 77.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {**YARN, "attention_factor": 0.7, "truncate": False},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "mscale_all_dim": 0.5},
    {**LLAMA3, "original_max_position_embeddings": 32},
    {"full_attention": {"rope_type": "default", "rope_theta": 7.0}, "sliding_attention": {"rope_type": "default"}},
)
# Beside another value of the same kind; and fields that configs on the hub have and classes do not.
OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("activation", "activation_function", "hidden_activation"), ("relu", "silu")),
    "attn_config": (
        {"clip_qkv": 0.1},
        {"softmax_scale": 0.2},
        {"alibi_bias_max": 4},
        {"qk_ln": True},
        {"attn_pdrop": 0.2},
    ),
    "hidden_act": ("gelu", "relu"),
    "is_causal": (False,),
    "layer_types": (["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2),
    "moe_layer_freq": (2,),
    "new_decoder_architecture": (True,),
    "original_max_position_embeddings": (16,),
    "pad_token_id": (5, -1, 96),
    "partial_rotary_factor": (0.5,),
    "rope_local_base_freq": (7.0,),
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": (500.0,),
    "scoring_func": ("softmax",),
    "sliding_window": (8,),
    "sliding_window_pattern": (2,),
    "topk_method": ("greedy",),
    "torch_dtype": ("bfloat16",),
}
NOTHING: dict[str, tuple[Any, ...]] = {"is_causal": ()}  # null means false to some models of transformers
# What names a model, or what transformers gives beside the logits.
LEFT_OUT = {
    "architectures", "dtype", "id2label", "label2id", "model_type", "output_attentions", "output_hidden_states",
    "return_dict", "transformers_version",
}  # fmt: skip


def others(found: object) -> tuple[object, ...]:
    """Give other values of the same kind."""
    if isinstance(found, bool):
        return (not found,)
    if isinstance(found, int):
        return (found + 1, found * 2)
    return (found * 1.5 + 0.1,) if isinstance(found, float) else ()


def changed(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give configs that differ from this one in a field, and name what differs."""
    config_class = getattr(transformers, config["architectures"][0]).config_class
    full = config_class.from_dict(dict(config)).to_dict()
    names = dict.fromkeys((*(field.name for field in fields(config_class)), *full, *config, *OTHERS))
    for name in names.keys() - LEFT_OUT:
        values = (*others(full.get(name)), *OTHERS.get(name, ()), *NOTHING.get(name, (None,)))
        rest = {key: kept for key, kept in config.items() if key != name}
        yield from ((f"{name}={value!r}", {**rest, name: value}) for value in values)
        if name in config:
            yield f"no {name}", rest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*TINY, *DECODERS])
def test_field_is_followed_or_refused(name: str, tmp_path: Path) -> None:
    wrong, num_followed = {}, 0
    for what, config in changed(read_config(name)):
        expected = by_transformers(tmp_path, config)
        if expected is None:
            continue
        try:
            found = by_stages(tmp_path)
        except UserError:
            continue
        except RuntimeError as error:
            if "strides should be" not in str(error):  # of widths that torch's grouped products do not take
                raise
            continue
        num_followed += 1
        if differing := differences(found, expected):
            wrong[what] = differing
    assert num_followed > 50
    assert wrong == {}


PADS: tuple[dict[str, Any], ...] = (
    {"pad_token_id": 5},
    {"pad_token_id": -1},  # of the last row
    {"pad_token_id": 5, "tie_word_embeddings": True},  # whose row the head trains
)
# Fields that nothing shows but training.
TRAINED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tiny-falcon", {"hidden_dropout": 0.2, "attention_dropout": 0.3}),
    ("tiny-gemma2", {"attention_dropout": 0.3}),
    ("tiny-gemma3", {"attention_dropout": 0.3}),
    ("tiny-gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3}),
    ("tiny-mixtral", {"attention_dropout": 0.3, "router_jitter_noise": 0.1}),
    ("tiny-opt", {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1}),
    ("tiny-phi", {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attention_dropout": 0.3}),
    ("tiny-phi3", {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attention_dropout": 0.3}),
    ("tiny-qwen2", {"attention_dropout": 0.3}),
)  # fmt: skip


# Every family has one of them, and the others as slow tests.
PADDED = [
    pytest.param(name, PADS[(row + turn) % 3], marks=pytest.mark.slow if turn else ())
    for row, name in enumerate((*TINY, *DECODERS))
    for turn in range(3)
]


@pytest.mark.parametrize(("name", "changes"), [*PADDED, *TRAINED])
def test_field_that_only_training_shows_gives_gradients_and_buffers_of_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    expected = by_transformers(tmp_path, read_config(name, **changes))
    assert expected is not None
    assert differences(by_stages(tmp_path), expected) == []


@pytest.mark.parametrize("field", ["norm_topk_prob", "rope_interleave"])
def test_flag_of_deepseek_v3_that_is_null_is_off_as_for_transformers(field: str, tmp_path: Path) -> None:
    expected = by_transformers(tmp_path, read_config("tiny-deepseek-v3", **{field: None}))
    assert expected is not None
    assert differences(by_stages(tmp_path), expected) == []


@pytest.mark.parametrize("name", TINY)
def test_model_that_is_not_causal_is_refused(name: str) -> None:
    with pytest.raises(UserError) as error:
        family_for(read_config(name, is_causal=False), max_seq_len=8)
    assert (error.value.code, error.value.where) == ("config.unsupported-value", "config.json: is_causal")
