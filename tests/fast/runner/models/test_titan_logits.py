"""torchtitan's families whole and cut into stages, against the models that transformers loads (fp32)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fast.runner.models.decoders import Variant
from tests.fast.runner.models.titans import (
    TITAN_CASES,
    batch_of,
    chunks_of,
    forward,
    gradients_in,
    in_files,
    load,
    loss_of,
    save_titan,
    worst,
)


@pytest.mark.parametrize("variant", TITAN_CASES)
def test_logits_and_gradients_are_those_of_transformers_and_cutting_changes_no_bit(
    variant: Variant, tmp_path: Path
) -> None:
    name, changes = variant
    save_titan(tmp_path, name, **changes)
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


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-qwen3", "tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-gpt-oss"])
def test_in_bf16_logits_are_near_and_what_is_not_trained_stays_exact(name: str, tmp_path: Path) -> None:
    save_titan(tmp_path, name)
    batch, exact, half = batch_of(0), chunks_of(tmp_path, 2), chunks_of(tmp_path, 2, torch.bfloat16)
    with torch.no_grad():
        expected, found = forward(exact, batch.tokens), forward(half, batch.tokens)
    assert found.dtype == torch.bfloat16
    # A token near the edge between two experts may change sides: the median tells of the rest.
    assert (found - expected).abs().median() <= 0.02 * expected.abs().max()
    pairs = zip(exact, half, strict=True)
    for one, other in ((a, b) for chunk, like in pairs for a, b in zip(chunk.buffers(), like.buffers(), strict=True)):
        assert one.dtype == other.dtype
