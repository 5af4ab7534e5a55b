"""RoPE that depends on a sequence's length: neither padding nor the sequences before change what its tokens give."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.models import family_for
from runner.pipeline.chunk import build_chunks
from runner.proof.stages import build_filled, tiny_of
from tests.fast.manifests.models.built import read_config
from tests.fast.manifests.models.catalogued import config_of
from tests.fast.runner.models.decoders import Variant, fill_pieces, save_decoder, variant_ids
from tests.fast.runner.models.titans import forward, load
from tests.fast.runner.tiny import split_evenly

CONTEXT = 16  # where frequencies change
MOST = 40
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
PHI3: Variant = ("tiny-phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": CONTEXT})
LAYERS = {"full_attention": {**DYNAMIC, "rope_theta": 7e3}, "sliding_attention": {"rope_type": "default"}}
DEPENDENT: tuple[Variant, ...] = (
    PHI3,
    *(
        (name, {"rope_scaling": DYNAMIC, "max_position_embeddings": CONTEXT, **more})
        for name, more in (
            ("tiny-qwen2", {}),
            ("tiny-mixtral", {"head_dim": 8}),
            ("tiny-falcon", {}),
            ("tiny-phi", {}),
            ("tiny-gemma2", {}),
        )
    ),
    ("tiny-gemma3", {"rope_parameters": LAYERS, "max_position_embeddings": CONTEXT}),
)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=name, marks=() if number in (0, 1, 3, 6) else pytest.mark.slow)
        for number, (variant, name) in enumerate(zip(DEPENDENT, variant_ids(DEPENDENT), strict=True))
    ],
)
@torch.no_grad()
def test_logits_are_those_of_the_tokens_alone_whatever_fills_up_and_came_before(
    variant: Variant, tmp_path: Path
) -> None:
    name, changes = variant
    save_decoder(tmp_path, name, **deepcopy(changes))  # transformers writes into it
    family = family_of(name, changes)
    chunks = build_chunks(family, split_evenly(family.modules, 3), range(3))
    fill_pieces(chunks, tmp_path)
    tokens = torch.randint(2, 90, (1, MOST), generator=torch.Generator().manual_seed(5))
    lengths = (MOST, 3, CONTEXT - 1, CONTEXT + 4, CONTEXT, CONTEXT + 1, MOST, CONTEXT)
    for length in lengths:
        padded = torch.zeros(1, family.padded_length(length, MOST), dtype=torch.int64)
        padded[:, :length] = tokens[:, :length]
        found = forward([chunk.eval() for chunk in chunks], padded)[:, :length]
        expected = load(tmp_path).eval()(tokens[:, :length]).logits
        assert (found - expected).abs().max() <= 1e-5, length


def test_padding_goes_up_to_where_frequencies_change() -> None:
    longrope, dynamic = (family_of(*variant) for variant in DEPENDENT[:2])
    assert [longrope.padded_length(length, MOST) for length in (1, CONTEXT, CONTEXT + 1)] == [CONTEXT, CONTEXT, MOST]
    assert longrope.padded_length(3, 10) == 10
    assert [dynamic.padded_length(length, MOST) for length in (1, CONTEXT, CONTEXT + 1)] == [CONTEXT, CONTEXT, 17]


def family_of(name: str, changes: dict[str, Any]) -> Any:
    return family_for(read_config(name, **changes), max_seq_len=MOST)


@pytest.mark.parametrize("architecture", ["Gemma4ForCausalLM", "DeepseekV4ForCausalLM"])
@torch.no_grad()
def test_rows_may_have_as_many_tokens_as_an_embedding_is_wide(architecture: str) -> None:
    """Where stages make up embeddings, as those that hand on trees do."""
    config = {**config_of(architecture).to_dict(), "architectures": [architecture]}
    family = tiny_of(family_for(config, max_seq_len=1))
    whole = family.whole()
    chunks = build_filled(family, whole, split_evenly(family.modules, 2), is_training=False)
    tokens = torch.randint(2, 90, (1, family.hidden_size), generator=torch.Generator().manual_seed(5))
    crossing = tokens
    for chunk in chunks:
        chunk.io = None
        crossing = chunk(crossing)
    assert torch.equal(crossing, whole.eval()(tokens)[0])
