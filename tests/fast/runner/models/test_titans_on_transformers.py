"""Architectures that torchtitan has, too, on its modules and on transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manifests.errors import UserError
from runner.models import family_for
from runner.pipeline.chunk import hf_constants
from tests.fast.manifests.models.built import read_config
from tests.fast.runner.models.decoders import save_decoder
from tests.fast.runner.models.titans import (
    batch_of,
    chunks_of,
    forward,
)


def test_bias_that_steers_experts_stays_float32_in_bf16(tmp_path: Path) -> None:
    save_decoder(tmp_path, "tiny-deepseek-v3")
    chunks = chunks_of(tmp_path, 2, torch.bfloat16)
    constants = [piece for chunk in chunks for piece in hf_constants(chunk)]
    assert constants
    assert {piece.memory.dtype for piece in constants} == {torch.float32}
    assert all(piece.memory.any() for piece in constants)


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
        family_for(read_config(name, **{field: value}), max_seq_len=8)
    assert (error.value.code, error.value.where) == ("config.unsupported-value", f"config.json: {field}")


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
