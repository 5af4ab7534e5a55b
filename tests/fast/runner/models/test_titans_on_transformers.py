"""Architectures that torchtitan has, too, on its modules and on transformers' own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from manifests.errors import UserError
from manifests.models.trainable import ON_TORCHTITAN, choose_implementation
from runner.models import family_for
from runner.models.generic import Generic
from runner.pipeline.chunk import hf_constants
from tests.fast.manifests.models.built import read_config
from tests.fast.runner.models.decoders import SEQ_LEN, Variant, save_decoder, variant_ids
from tests.fast.runner.models.titans import (
    LLAMAS,
    batch_of,
    chunks_of,
    forward,
    gradients_in,
    in_files,
    load,
    loss_of,
    worst,
)


def test_bias_that_steers_experts_stays_float32_in_bf16(tmp_path: Path) -> None:
    save_decoder(tmp_path, "tiny-deepseek-v3")
    chunks = chunks_of(tmp_path, 2, torch.bfloat16, implementation="transformers")
    constants = [piece for chunk in chunks for piece in hf_constants(chunk)]
    assert constants
    assert {piece.memory.dtype for piece in constants} == {torch.float32}
    assert all(piece.memory.any() for piece in constants)


def test_llama_trains_on_torchtitan_and_without_it_on_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_implementation(ON_TORCHTITAN) == "torchtitan"
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    assert choose_implementation(ON_TORCHTITAN) == "transformers"
    assert isinstance(family_for(read_config("tiny-llama"), max_seq_len=SEQ_LEN), Generic)
    with pytest.raises(UserError) as error:
        family_for(read_config("tiny-llama"), max_seq_len=SEQ_LEN, implementation="torchtitan")
    assert (error.value.code, error.value.where) == ("system.missing-package", "torchtitan")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Olmo3ForCausalLM", "Qwen3ForCausalLM"])
def test_torchtitan_is_refused_for_others(name: str) -> None:
    assert choose_implementation(name) == "transformers"
    with pytest.raises(UserError) as error:
        choose_implementation(name, "torchtitan")
    assert error.value.code == "options.implementation"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("tiny-llama", "pretraining_tp", 2),
        ("tiny-qwen3", "is_causal", False),
        ("tiny-deepseek-v3", "scoring_func", "softmax"),
        ("tiny-gpt-oss", "output_router_logits", True),
    ],
)
def test_field_that_transformers_ignores_is_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        family_for(read_config(name, **{field: value}), max_seq_len=8, implementation="transformers")
    assert (error.value.code, error.value.where) == ("config.unsupported-value", f"config.json: {field}")


# torchtitan's families whole and cut into stages, against the models that transformers loads (fp32).


@pytest.mark.parametrize("variant", LLAMAS, ids=variant_ids(LLAMAS))
def test_logits_and_gradients_are_those_of_transformers_and_cutting_changes_no_bit(
    variant: Variant, tmp_path: Path
) -> None:
    name, changes = variant
    save_decoder(tmp_path, name, **changes)
    model, batch, tied = load(tmp_path), batch_of(0), bool(changes.get("tie_word_embeddings"))
    expected = model(batch.tokens).logits
    torch.autograd.backward(loss_of(expected, batch))
    assert expected.abs().max() > 0.5

    chunks = chunks_of(tmp_path, 1)
    whole = forward(chunks, batch.tokens)
    torch.autograd.backward(loss_of(whole, batch))
    assert (whole - expected).abs().max() <= 5e-6
    gradients = gradients_in(chunks, tied=tied)
    assert worst(gradients, in_files(model, tmp_path, gradients=True)) <= 1e-5
    cut = chunks_of(tmp_path, len(chunks[0].family.modules))
    logits = forward(cut, batch.tokens)
    torch.autograd.backward(loss_of(logits, batch))
    assert torch.equal(logits, whole)
    found = gradients_in(cut, tied=tied)
    assert all(torch.equal(found[fqn], gradients[fqn]) for fqn in gradients)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-deepseek-v3"])
def test_in_bf16_logits_are_near_and_what_is_not_trained_stays_exact(name: str, tmp_path: Path) -> None:
    save_decoder(tmp_path, name)
    batch, exact, half = batch_of(0), chunks_of(tmp_path, 2), chunks_of(tmp_path, 2, torch.bfloat16)
    with torch.no_grad():
        expected, found = forward(exact, batch.tokens), forward(half, batch.tokens)
    assert found.dtype == torch.bfloat16
    # A token near the edge between two experts may change sides: the median tells of the rest.
    assert (found - expected).abs().median() <= 0.02 * expected.abs().max()
    pairs = zip(exact, half, strict=True)
    for one, other in ((a, b) for chunk, like in pairs for a, b in zip(chunk.buffers(), like.buffers(), strict=True)):
        assert one.dtype == other.dtype
