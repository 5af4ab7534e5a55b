"""Stages of a model with MTP layers where nothing is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree
from transformers import DeepseekV3ForCausalLM

from manifests.errors import UsageError
from manifests.models import model_shape
from manifests.models.mtp import MtpLayers
from manifests.models.trainable import generic_entry
from runner.bundle.packed import open_packed
from runner.evaluation.scores import TokenLosses
from runner.models import family_for, family_of
from runner.pipeline.chunk import build_chunks, hf_constants, hf_pieces, materialize
from tests.builders import pack
from tests.fast.runner.tiny import CPU
from tests.process.runner.pipeline.mtp_oracle import CLASSES, NEXT, Case, config_of, random_weights, shape_of
from tools.parity import compare_stages


@pytest.mark.parametrize("layout", ["EttttmL", "Et|ttt|m|L", "Ett|tt|m|mL"])
def test_stages_compute_the_model_alone(layout: str, tmp_path: Path) -> None:
    depth = layout.count("m")
    config, weights = config_of(depth), random_weights(depth)
    family = family_for(config, max_seq_len=8, shape=model_shape(config))
    stage_modules = Case(schedule="1F1B", layout=layout).stage_modules
    chunks = build_chunks(family, stage_modules, range(len(stage_modules)))
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=torch.float32)
        for piece in (*hf_pieces(chunk), *hf_constants(chunk)):
            piece.memory.copy_(weights[piece.fqn] if "eh_proj" not in piece.fqn else torch.full((), torch.nan))
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


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_layer_beside_the_decoder_is_as_transformers_has_it(architecture: str) -> None:
    config, shape = config_of(1, beside=architecture), shape_of(1, beside=architecture)
    family = family_for(config, max_seq_len=8, shape=shape)
    case = Case(schedule="1F1B", layout="Ett|tt|m|L", beside=architecture)
    compared, _, _ = compare_stages(family.tiny(), case.stage_modules)  # type: ignore[attr-defined]
    assert compared.is_equal


def test_a_layer_beside_the_decoder_with_other_names_is_not_trained() -> None:
    shape = shape_of(1, beside=NEXT)
    entry = generic_entry("Qwen3NextForCausalLM")
    assert entry is not None
    assert MtpLayers.find(entry, shape) is not None
    tensors = {name.replace("mtp.fc.", "mtp.projection."): dims for name, dims in shape.tensors.items()}
    assert MtpLayers.find(entry, replace(shape, tensors=tensors)) is None


@pytest.mark.parametrize("is_dropped", [False, True])
def test_layers_that_files_lack_or_that_were_dropped_are_none_of_the_model(is_dropped: bool, tmp_path: Path) -> None:
    config, source = config_of(1), tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    weights = random_weights(1 if is_dropped else 0)
    save_file({name: weight.clone() for name, weight in weights.items()}, source / "model.safetensors")
    layer = f"model.layers.{config['num_hidden_layers']}"
    packed = open_packed(pack(source, tmp_path / "packed", "pp=2", *(("--drop", layer) if is_dropped else ())))
    assert layer not in packed.shape.modules
    assert family_of(packed, 8).modules == tuple(chain(*packed.stage_modules))


@pytest.mark.parametrize("beside", ["", NEXT])
def test_hidden_states_of_an_mtp_layer_are_refused_as_none_runs_in_an_evaluation(beside: str) -> None:
    case = Case(schedule="1F1B", layout="Ettt|tmL" if beside else "Etttt|mL", beside=beside)
    shape, config = shape_of(1, beside=beside), config_of(1, beside=beside)
    family = family_for(config, max_seq_len=8, shape=shape)
    chunks = build_chunks(family, case.stage_modules, range(2))
    TokenLosses().watch(chunks, "model.layers.3")
    with pytest.raises(UsageError) as caught:
        TokenLosses().watch(chunks, shape.modules[-3])
    assert (caught.value.code, caught.value.where) == ("options.scores", f"--hidden-states {shape.modules[-3]}")
