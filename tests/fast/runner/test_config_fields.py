"""Every field of every config: a stage follows it as transformers does, or it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from manifests.errors import InputError, UserError
from manifests.models import model_shape
from runner.families import family_for
from runner.pipeline.chunk import build_chunks
from tests.fast.models.built import DECODERS, TINY, perturb, read_config, saved_tensors
from tests.fast.runner.decoders import SEQ_LEN, fill_pieces
from tests.fast.runner.tiny import split_evenly
from tests.fast.runner.titans import forward

TOKENS = torch.randint(2, 90, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
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
    "attn_config": ({"clip_qkv": 0.1}, {"softmax_scale": 0.2}, {"alibi_bias_max": 4}, {"qk_ln": True}),
    "hidden_act": ("gelu", "relu"),
    "is_causal": (False,),
    "layer_types": (["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2),
    "moe_layer_freq": (2,),
    "new_decoder_architecture": (True,),
    "original_max_position_embeddings": (16,),
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


def save(folder: Path, config: dict[str, Any]) -> torch.Tensor | None:
    """Save a random model under this config, and give its logits; None: transformers refuses it, or fails."""
    model_class = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    try:
        model = perturb(model_class(model_class.config_class.from_dict(json.loads(json.dumps(config)))))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        logits: torch.Tensor = model.train(False)(TOKENS).logits
    except (StrictDataclassError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return logits


def stages_of(folder: Path) -> torch.Tensor:
    config = json.loads((folder / "config.json").read_text())
    if not saved_tensors(folder).items() <= model_shape(config).tensors.items():
        raise InputError("", "`reshard pack` refuses it")
    family = family_for(config, max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, split_evenly(family.modules, 3), range(3))
    fill_pieces(chunks, folder)
    return forward([chunk.eval() for chunk in chunks], TOKENS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*TINY, *DECODERS])
@torch.no_grad()
def test_field_is_followed_or_refused(name: str, tmp_path: Path) -> None:
    wrong, num_followed = [], 0
    for what, config in changed(read_config(name)):
        expected = save(tmp_path, config)
        if expected is None:
            continue
        try:
            found = stages_of(tmp_path)
        except UserError:
            continue
        except RuntimeError as error:
            if "strides should be" not in str(error):  # of widths that torch's grouped products do not take
                raise
            continue
        num_followed += 1
        if found.shape != expected.shape or not (found - expected).abs().max() <= 2e-5:
            wrong.append(what)
    assert num_followed > 50
    assert wrong == []


@pytest.mark.parametrize("field", ["norm_topk_prob", "rope_interleave"])
@torch.no_grad()
def test_flag_of_deepseek_v3_that_is_null_is_off_as_for_transformers(field: str, tmp_path: Path) -> None:
    expected = save(tmp_path, read_config("tiny-deepseek-v3", **{field: None}))
    assert expected is not None
    assert (stages_of(tmp_path) - expected).abs().max() <= 5e-6


@pytest.mark.parametrize("name", TINY)
def test_model_that_is_not_causal_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^config.json: is_causal: False is not modelled; expected True or nothing$"):
        family_for(read_config(name, is_causal=False), max_seq_len=8)
