"""Every field of every config: a stage follows it as transformers does, or it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import nn

from manifests.errors import InputError, UserError
from manifests.models import model_shape
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, hf_constants, hf_pieces
from runner.pipeline.microbatches import token_loss
from tests.fast.manifests.models.built import DECODERS, TINY, perturb, read_config, saved_tensors
from tests.fast.runner.models.decoders import SEQ_LEN, fill_pieces, tied_name
from tests.fast.runner.models.titans import forward
from tests.fast.runner.tiny import split_evenly

TOKENS = torch.randint(0, 96, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
TOKENS[0, :4] = torch.tensor([0, 1, 5, 95])  # defaults of pad_token_id, one that tests set, and the last, which is -1
_LABELS = TOKENS[:, 1:]
_SEED = 11  # of what dropout draws
_REFUSALS = (StrictDataclassError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# A bias of keys without rotation moves all scores of a query alike: its gradient is rounding. So is that of an
# expert that all tokens leave; both are nothing beside the norm of all gradients.
_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """Logits without and with training mode; the rest after a backward in it, by names in files or in modules."""

    logits: torch.Tensor
    trained_logits: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def by_transformers(folder: Path, config: dict[str, Any]) -> Computed | None:
    """Save a random model under this config, and return what it computes; None: transformers refuses it, or fails."""
    model_class = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    try:
        model = perturb(model_class(model_class.config_class.from_dict(json.loads(json.dumps(config)))))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        with torch.no_grad():
            logits = model.eval()(TOKENS).logits
        model.save_pretrained(folder)
        torch.manual_seed(_SEED)
        out = model.train()(TOKENS, labels=TOKENS)
        torch.autograd.backward(out.loss)
    except _REFUSALS:
        return None
    (folder / "config.json").write_text(json.dumps(config))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} | dict(_rotary_tables(model))
    for parameter in model.parameters():  # saved as weights are, gradients have the names of files
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")
    gradients = load_file(folder / "gradients" / "model.safetensors")
    persistent = gradients.keys() & {name for name, _ in model.named_buffers()}
    return Computed(
        logits=logits,
        trained_logits=out.logits.detach(),
        gradients={fqn: tensor for fqn, tensor in gradients.items() if fqn not in persistent},
        buffers=buffers,
    )


def by_stages(folder: Path) -> Computed:
    """Return what the model in a folder computes in three stages.

    Raises:
        UserError: its config is refused.
    """
    config = json.loads((folder / "config.json").read_text())
    if not saved_tensors(folder).items() <= model_shape(config).tensors.items():
        raise InputError("", "`reshard pack` refuses it", code="config.unsupported-value")
    family = family_for(config, max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, split_evenly(family.modules, 3), range(3))
    fill_pieces(chunks, folder)
    with torch.no_grad():
        logits = forward([chunk.eval() for chunk in chunks], TOKENS)
    torch.manual_seed(_SEED)
    trained_logits = forward([chunk.train() for chunk in chunks], TOKENS)
    torch.autograd.backward(token_loss(trained_logits[:, :-1], _LABELS, num_tokens=_LABELS.numel()))
    return Computed(
        logits=logits,
        trained_logits=trained_logits.detach(),
        gradients=_gradients(chunks, saved_tensors(folder)),
        buffers=dict(_buffers(chunks)),
    )


def differences(found: Computed, expected: Computed) -> list[str]:
    """Name what differs by more than rounding."""
    wrong = [
        name for name in ("logits", "trained_logits") if not _is_near(getattr(found, name), getattr(expected, name))
    ]
    if found.gradients.keys() != expected.gradients.keys():
        return [*wrong, *sorted(found.gradients.keys() ^ expected.gradients.keys())]
    floor = _FLOOR * float(torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm())
    for fqn, gradient in expected.gradients.items():
        if not (found.gradients[fqn] - gradient).norm() <= 2e-5 * gradient.norm() + floor:
            wrong.append(f"gradient of {fqn}")
    wrong += [
        f"buffer {name}" for name, buffer in found.buffers.items() if not _is_near(buffer, expected.buffers[name])
    ]
    return wrong


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 2e-5)


def _gradients(chunks: Iterable[StageChunk], stored: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return gradients by names in files, that of a tied head added to the embedding's."""

    def gradient(weight: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(weight) if weight.grad is None else weight.grad

    found = {piece.fqn: piece.memory for chunk in chunks for piece in hf_pieces(chunk, gradient)}
    for fqn in found.keys() - set(stored):
        embedding = tied_name(stored)
        found[embedding] = found[embedding] + found.pop(fqn)
    return found


def _buffers(chunks: Iterable[StageChunk]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what stages hold besides parameters, under transformers' names where they have one."""
    for chunk in chunks:
        yield from ((piece.fqn, piece.memory) for piece in hf_constants(chunk))
        for name, buffer in chunk.body.named_buffers():
            if hasattr(chunk.body, "model"):  # a part of transformers' own
                yield name.removeprefix("model."), buffer
            elif name.endswith("rope.cache"):
                cos, sin = buffer[:SEQ_LEN].chunk(2, dim=-1)
                half = cos.shape[-1] // 2
                yield _ROTARY, torch.cat([cos[:, :half], sin[:, :half]], dim=-1)


_ROTARY = "cosines and sines"


def _rotary_tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the cosines and sines of every position, where all layers have the same."""
    for name, part in model.named_modules():
        if name.endswith("rotary_emb") and isinstance(getattr(part, "rope_type", None), str):
            cos, sin = part(torch.zeros(()), torch.arange(SEQ_LEN)[None])
            half = part.inv_freq.shape[0]
            yield _ROTARY, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


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
