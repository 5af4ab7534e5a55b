"""The Llama family against `transformers`, whole and cut into stages, in one process (fp32)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks
from tests.fast.runner.tiny import SIZES, fill, read_config, save_model, split_evenly

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL: Mapping[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 256}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama 2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
    "grouped queries": {"num_key_value_heads": 2},
    "one key and value head, theta": {
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "llama 3.1 rope": {"rope_parameters": LLAMA3_ROPE},
    "llama 3.2: rope and tied": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "narrow heads, tied": {"head_dim": 8, "tie_word_embeddings": True},
}
SEQ_LEN = 160  # beyond the original context of the rope above
TOKENS = torch.randint(0, SIZES["vocab_size"], (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(chunks: tuple[StageChunk, ...]) -> torch.Tensor:
    tensor = TOKENS
    for chunk in chunks:
        tensor = chunk(tensor)
    return tensor


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_logits_equal_transformers_and_cutting_changes_no_bit(overrides: Mapping[str, Any], tmp_path: Path) -> None:
    model = save_model(tmp_path, **{**SMALL, **overrides})
    with torch.no_grad():
        expected = model(TOKENS).logits
    family = family_for(read_config(tmp_path), max_seq_len=SEQ_LEN)
    whole = build_chunks(family, (family.modules,), (0,))
    fill(whole, tmp_path)
    found = run(whole)
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() <= 5e-6

    stage_modules = split_evenly(family.modules, 3)
    chunks = build_chunks(family, stage_modules, range(3))
    fill(chunks, tmp_path)
    assert torch.equal(run(chunks), found)


def test_config_of_transformers_4_means_the_same(tmp_path: Path) -> None:
    save_model(tmp_path, **SMALL, rope_parameters=LLAMA3_ROPE)
    config = read_config(tmp_path)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old |= {"rope_theta": 500000.0, "rope_scaling": scaling}
    outputs = []
    for each in (config, old, {**old, "rope_scaling": {**scaling, "factor": 2.0}}):
        family = family_for(each, max_seq_len=SEQ_LEN)
        chunks = build_chunks(family, (family.modules,), (0,))
        fill(chunks, tmp_path)
        outputs.append(run(chunks))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_planted_wrong_eps_is_caught(tmp_path: Path) -> None:
    model = save_model(tmp_path, **SMALL, rms_norm_eps=1e-6)
    family = family_for({**read_config(tmp_path), "rms_norm_eps": 1e-5}, max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, (family.modules,), (0,))
    fill(chunks, tmp_path)
    with torch.no_grad():
        assert (run(chunks) - model(TOKENS).logits).abs().max() > 5e-6
