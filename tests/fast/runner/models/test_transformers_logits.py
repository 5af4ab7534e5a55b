"""transformers' decoders whole and cut into stages, against the model that transformers loads (fp32)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fast.manifests.models.built import TINY
from tests.fast.runner.models.decoders import VARIANTS, Variant, save_decoder, variant_ids
from tests.fast.runner.models.titans import (
    TITANS,
    YARN,
    batch_of,
    chunks_of,
    forward,
    gradients_in,
    in_files,
    load,
    loss_of,
)

# Each decoder is compared with its head tied; as it is, and with fields that others have as well, among the slow tests.
OF_SLOW_TESTS = {
    "rope_scaling", "num_ln_in_parallel_attn", "_remove_final_layer_norm", "enable_bias", "qk_layernorm",
}  # fmt: skip
FORMS: tuple[Variant, ...] = (
    *((name, {"tie_word_embeddings": True}) for name in TINY if name not in ("tiny-qwen3", "tiny-llama")),
    ("tiny-qwen2", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("tiny-qwen2", {"rope_scaling": YARN, "max_position_embeddings": 96, "num_key_value_heads": 4}),
)
IS_SLOW = (
    *(not variant[1] or not OF_SLOW_TESTS.isdisjoint(variant[1]) for variant in VARIANTS),
    *(row in (0, 1, 4, 6, 9, 13, 15) for row in range(len(TITANS))),
    *(True for _ in FORMS),
)
ALL = (*VARIANTS, *TITANS, *FORMS)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=name, marks=pytest.mark.slow if is_slow else ())
        for variant, name, is_slow in zip(ALL, variant_ids(ALL), IS_SLOW, strict=True)
    ],
)
def test_logits_and_gradients_are_those_of_transformers_however_it_is_cut(variant: Variant, tmp_path: Path) -> None:
    name, changes = variant
    save_decoder(tmp_path, name, **changes)
    batch, is_tied = batch_of(0), bool(changes.get("tie_word_embeddings"))
    # transformers' grouped products refuse this width.
    model = load(tmp_path, experts="eager" if "moe_intermediate_size" in changes else None)
    expected = model(batch.tokens).logits
    torch.autograd.backward(loss_of(expected, batch))
    gradients = in_files(model, tmp_path, gradients=True)
    assert expected.abs().max() > 0.4

    for num_stages in (1, 3) if is_tied else (2, 4):  # `test_model_may_be_cut_anywhere` has all cuts
        chunks = chunks_of(tmp_path, num_stages)
        logits = forward(chunks, batch.tokens)
        torch.autograd.backward(loss_of(logits, batch))
        assert torch.equal(logits, expected)
        found = gradients_in(chunks, tied=is_tied)
        assert found.keys() == gradients.keys()
        assert [fqn for fqn, gradient in found.items() if not torch.equal(gradient, gradients[fqn])] == []
