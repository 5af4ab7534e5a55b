"""transformers' decoders whole and cut into stages, against the model that transformers loads (fp32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from runner.data.sequences import IGNORED
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks
from tests.fast.runner.models.decoders import (
    SEQ_LEN,
    VARIANTS,
    Variant,
    fill_pieces,
    save_decoder,
    tied_name,
    variant_ids,
)
from tests.fast.runner.tiny import padded_batch, read_config, split_evenly

BATCH = padded_batch(0, size=3, seq_len=SEQ_LEN, vocab_size=96)


def load(folder: Path) -> Any:
    (architecture,) = read_config(folder)["architectures"]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)


def chunks_of(folder: Path, stage_modules: tuple[tuple[str, ...], ...]) -> tuple[StageChunk, ...]:
    family = family_for(read_config(folder), max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, stage_modules, range(len(stage_modules)))
    fill_pieces(chunks, folder)
    return chunks


def modules_of(folder: Path) -> tuple[str, ...]:
    return family_for(read_config(folder), max_seq_len=SEQ_LEN).modules


def forward(chunks: tuple[StageChunk, ...]) -> torch.Tensor:
    tensor = BATCH.tokens
    for chunk in chunks:
        tensor = chunk(tensor)
    return tensor


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), BATCH.labels.flatten(), ignore_index=IGNORED)


# Each decoder is compared with its head tied; as it is, and with these fields, among the slow tests.
OF_SLOW_TESTS = {
    "rope_scaling", "num_ln_in_parallel_attn", "_remove_final_layer_norm", "enable_bias", "qk_layernorm",
}  # fmt: skip
CASES = [
    pytest.param(
        variant, id=name, marks=() if variant[1] and OF_SLOW_TESTS.isdisjoint(variant[1]) else pytest.mark.slow
    )
    for variant, name in zip(VARIANTS, variant_ids(VARIANTS), strict=True)
]


@pytest.mark.parametrize("variant", CASES)
def test_logits_and_gradients_are_those_of_transformers_however_it_is_cut(variant: Variant, tmp_path: Path) -> None:
    name, changes = variant
    save_decoder(tmp_path, name, **changes)
    model = load(tmp_path).train()
    expected = model(BATCH.tokens).logits
    torch.autograd.backward(loss_of(expected))
    gradients = gradients_in_files(model, tmp_path)
    assert expected.abs().max() > 0.4

    modules, is_tied = modules_of(tmp_path), bool(changes.get("tie_word_embeddings"))
    for num_stages in (1, 3) if is_tied else (2, 4):  # `test_model_may_be_cut_anywhere` has all cuts
        chunks = chunks_of(tmp_path, split_evenly(modules, num_stages))
        logits = forward(chunks)
        torch.autograd.backward(loss_of(logits))
        assert torch.equal(logits, expected)
        found = gradients_of(chunks, tied=is_tied)
        assert found.keys() == gradients.keys()
        for fqn, gradient in found.items():
            assert torch.equal(gradient, gradients[fqn]), fqn


def gradients_of(chunks: tuple[StageChunk, ...], *, tied: bool) -> dict[str, torch.Tensor]:
    found = {
        piece.fqn: piece.memory
        for chunk in chunks
        for name, parameter in chunk.body.named_parameters()
        if parameter.grad is not None
        for piece in chunk.family.pieces(name, parameter.grad, (0,) * parameter.dim())
    }
    if tied:
        name = tied_name(found)
        found[name] = found[name] + found.pop("lm_head.weight")
    return found


def gradients_in_files(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Give the gradients under the names that transformers saves weights by."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder / "gradients")
    from safetensors.torch import load_file

    return load_file(folder / "gradients" / "model.safetensors")
