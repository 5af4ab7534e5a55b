"""Stages of a model with MTP layers where nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree
from transformers import DeepseekV3ForCausalLM

from manifests.models import model_shape
from runner.models import family_for
from runner.models.family import WithMtp
from runner.pipeline.chunk import build_chunks, hf_constants, hf_pieces, materialize
from tests.fast.runner.tiny import CPU
from tests.process.runner.pipeline.mtp_oracle import Case, config_of, random_weights


@pytest.mark.parametrize("layout", ["EttttmL", "Et|ttt|m|L", "Ett|tt|m|mL"])
def test_stages_compute_the_model_alone(layout: str, tmp_path: Path) -> None:
    depth = layout.count("m")
    config, weights = config_of(depth), random_weights(depth)
    family = family_for(config, max_seq_len=8, implementation="transformers", shape=model_shape(config))
    assert isinstance(family, WithMtp)
    family.runs_mtp = False
    stage_modules = Case(schedule="1F1B", layout=layout).stage_modules
    chunks = build_chunks(family, stage_modules, range(len(stage_modules)))
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=torch.float32)
        for piece in (*hf_pieces(chunk), *hf_constants(chunk)):
            piece.memory.copy_(weights[piece.fqn] if "eh_proj" not in piece.fqn else torch.full((), torch.nan))
    assert family.mtp_ties(stage_modules) == ()
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    save_file({name: weight.clone() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(1, 96, (2, 8), generator=torch.Generator().manual_seed(0))
    crossing: object = tokens
    with torch.no_grad():
        for chunk in chunks:
            crossing = chunk.eval()(crossing)
            leaves = [leaf for leaf in pytree.tree_leaves(crossing) if leaf is not None]
            assert all(torch.isfinite(leaf).all() for leaf in leaves)
            assert sum(leaf.numel() for leaf in leaves if leaf.dim() == 3) == leaves[0].numel()  # nothing of a depth
        expected = model(tokens).logits
    assert isinstance(crossing, torch.Tensor)
    torch.testing.assert_close(crossing, expected, rtol=0, atol=1e-5)
