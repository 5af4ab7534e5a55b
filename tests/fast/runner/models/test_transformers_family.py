"""What the road over transformers builds, what it calls things, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import InputError, UserError
from manifests.models import ARCHITECTURES, model_shape
from manifests.models.trainable import is_generic
from runner.models import family_for, generic
from runner.pipeline.chunk import StageChunk, build_chunks, hf_constants, hf_pieces
from runner.training.rng import seed_rng
from tests.fast.manifests.models.built import DECODERS, TINY, TRUE, TRUE_DECODERS, read_config
from tests.fast.runner.models.decoders import SEQ_LEN, fill_pieces, save_decoder
from tests.fast.runner.tiny import split_evenly

TOKENS = torch.randint(0, 96, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
MIXTRAL = family_for(read_config("tiny-mixtral"), max_seq_len=8)
EXPERTS, ROWS, COLUMNS = 4, 80, 32  # of the tiny Mixtral: experts, F, D


def chunks_of(folder: Path, num_stages: int, dtype: torch.dtype = torch.float32) -> tuple[StageChunk, ...]:
    family = family_for(json.loads((folder / "config.json").read_text()), max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, split_evenly(family.modules, num_stages), range(num_stages))
    fill_pieces(chunks, folder, dtype)
    return chunks


@torch.no_grad()
def forward(chunks: tuple[StageChunk, ...]) -> torch.Tensor:
    tensor = TOKENS
    for chunk in chunks:
        tensor = chunk(tensor)
    return tensor


def test_every_architecture_described_by_hand_trains_by_the_catalogue() -> None:
    architectures = {read_config(name)["architectures"][0] for name in (*DECODERS, *TINY)}
    assert architectures | {"MPTForCausalLM"} == ARCHITECTURES.keys()
    assert all(map(is_generic, architectures))


@pytest.mark.parametrize("name", [*TRUE_DECODERS, *TRUE])
def test_stage_of_a_true_model_is_built_without_memory_and_holds_its_own_tensors(name: str) -> None:
    config = read_config(name)
    config.pop("quantization_config", None)
    family, shape = family_for(config, max_seq_len=16), model_shape(config)
    modules = (*family.modules[1:3], *family.modules[-4:-2])
    (chunk,) = build_chunks(family, (modules,), (0,))
    assert all(tensor.is_meta for tensor in (*chunk.parameters(), *chunk.buffers()))
    found = {piece.fqn: piece.shape for piece in (*hf_pieces(chunk), *hf_constants(chunk))}
    by_module = shape.by_module()
    assert found == {fqn: shape.tensors[fqn] for module in modules for fqn in by_module[module]}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("tiny-gpt2", {}), ("tiny-falcon", {}), ("tiny-opt", {"word_embed_proj_dim": 16}), ("tiny-mixtral", {})],
)
def test_model_may_be_cut_anywhere(name: str, changes: Mapping[str, Any], tmp_path: Path) -> None:
    save_decoder(tmp_path, name, **changes)
    family = family_for(json.loads((tmp_path / "config.json").read_text()), max_seq_len=SEQ_LEN)
    expected = forward(chunks_of(tmp_path, 1))
    assert torch.equal(forward(chunks_of(tmp_path, len(family.modules))), expected)


@torch.no_grad()
def test_experts_of_widths_that_torch_cannot_multiply_at_once_are_multiplied_one_by_one(tmp_path: Path) -> None:
    save_decoder(tmp_path, "tiny-mixtral", intermediate_size=78)
    model = transformers.MixtralForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="eager"
    )
    assert torch.equal(forward(chunks_of(tmp_path, 2, torch.bfloat16)), model(TOKENS).logits)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((("gate_up_proj", 2 * ROWS, COLUMNS), ("down_proj", COLUMNS, ROWS))),
    st.tuples(*[st.tuples(st.integers(0, 100), st.integers(0, 100))] * 3),
)
def test_pieces_of_any_box_of_stacked_experts_are_boxes_of_their_tensors(
    leaf: tuple[str, int, int], drawn: tuple[tuple[int, int], ...]
) -> None:
    name, sizes = leaf[0], (EXPERTS, *leaf[1:])
    tensors = {
        f"model.layers.2.block_sparse_moe.experts.{index}.{part}.weight": torch.rand(rows, leaf[2])
        for index in range(EXPERTS)
        for part, rows in (("w1", ROWS), ("w3", ROWS), ("w2", COLUMNS))
    }
    parts = ("w1", "w3") if name == "gate_up_proj" else ("w2",)
    stacked = torch.stack(
        [
            torch.cat([tensors[f"model.layers.2.block_sparse_moe.experts.{index}.{part}.weight"] for part in parts])
            for index in range(EXPERTS)
        ]
    )
    bounds = [sorted((low % (size + 1), high % (size + 1))) for (low, high), size in zip(drawn, sizes, strict=True)]
    box = stacked[tuple(slice(*pair) for pair in bounds)]
    pieces = MIXTRAL.pieces(f"model.model.layers.2.mlp.experts.{name}", box, tuple(low for low, _ in bounds))
    assert sum(piece.memory.numel() for piece in pieces) == box.numel()
    for piece in pieces:
        begins = zip(piece.offset, piece.memory.shape, strict=True)
        assert piece.shape == tuple(tensors[piece.fqn].shape)
        assert torch.equal(piece.memory, tensors[piece.fqn][tuple(slice(at, at + size) for at, size in begins)])
        assert (
            piece.memory.numel() == 0 or piece.memory.untyped_storage().data_ptr() == box.untyped_storage().data_ptr()
        )


@pytest.mark.parametrize("name", DECODERS)
def test_in_bf16_logits_are_those_of_transformers_and_buffers_stay_exact(name: str, tmp_path: Path) -> None:
    save_decoder(tmp_path, name)
    (architecture,) = read_config(name)["architectures"]
    model = getattr(transformers, architecture).from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert torch.equal(forward(chunks_of(tmp_path, 2, torch.bfloat16)), expected)


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("tiny-qwen2", {"rope_theta": 500.0, "rope_scaling": None}),
        ("tiny-mixtral", {"rope_theta": 500.0}),
        ("tiny-phi", {"rope_theta": 500.0, "partial_rotary_factor": 0.25, "num_key_value_heads": 4}),
        ("tiny-gemma3", {"rope_theta": 5000.0, "rope_local_base_freq": 50.0, "sliding_window_pattern": 3}),
    ],
)
def test_config_of_transformers_4_means_what_transformers_5_reads_in_it(
    name: str, old: Mapping[str, Any], tmp_path: Path
) -> None:
    save_decoder(tmp_path, name)
    new = forward(chunks_of(tmp_path, 2))
    (tmp_path / "config.json").write_text(json.dumps({**read_config(name), **old, "torch_dtype": "bfloat16"}))
    (architecture,) = read_config(name)["architectures"]
    model = getattr(transformers, architecture).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(TOKENS).logits
    found = forward(chunks_of(tmp_path, 2))
    assert torch.equal(found, expected)
    assert not torch.equal(found, new)


def test_dropout_draws_what_transformers_draws(tmp_path: Path) -> None:
    save_decoder(tmp_path, "tiny-gpt2", embd_pdrop=0.2, attn_pdrop=0.2, resid_pdrop=0.2)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).train()
    torch.manual_seed(5)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.manual_seed(5)
    assert torch.equal(forward(chunks_of(tmp_path, 4)), expected)


def test_each_rank_and_seed_draws_random_numbers_of_its_own() -> None:
    drawn = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        seed_rng(seed, rank)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    [
        ("tiny-mixtral", {"output_router_logits": True},
         "config.json: output_router_logits"),
        ("tiny-gemma3", {"use_bidirectional_attention": True},
         "config.json: use_bidirectional_attention"),
        ("tiny-mpt", {"attn_config": {"alibi_bias_max": 16}},
         "config.json: attn_config.alibi_bias_max"),
        ("tiny-mpt", {"logit_scale": "inv_sqrt_d_model"},
         "config.json: logit_scale"),
        ("tiny-mpt", {"resid_pdrop": 0.1}, "config.json: resid_pdrop"),
        ("tiny-opt", {"layerdrop": 0.1}, "config.json: layerdrop"),
        ("tiny-mixtral", {"num_experts": 7},
         "config.json: num_experts"),
        ("tiny-gpt2", {"num_attention_heads": 2},
         "config.json: num_attention_heads"),
        ("tiny-gpt2", {"n_positions": 47},
         "--seq-len"),
        ("tiny-mpt", {"max_seq_len": 32},
         "--seq-len"),
        ("tiny-opt", {"max_position_embeddings": 40},
         "--seq-len"),
    ],
)  # fmt: skip
def test_config_that_would_be_computed_otherwise_is_refused(
    name: str, changes: dict[str, Any], where: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(UserError) as error:
        family_for(read_config(name, **changes), max_seq_len=SEQ_LEN)
    assert error.value.where == where
    wording(f"{error.value.code}: {error.value}")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [("tiny-qwen2", {"hidden_act": "relu7"}, "relu7"), ("tiny-gemma2", {"num_attention_heads": 7}, "multiple")],
)
def test_config_that_transformers_refuses_is_refused_in_a_sentence(
    name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as error:
        family_for({**read_config(name, **changes), "num_key_value_heads": 1}, max_seq_len=8).build(())
    line, *more = str(error.value).splitlines()
    assert line.startswith(f"config.json: transformers {transformers.__version__} refuses it: ")
    assert said in line
    assert more == []


def test_missing_transformers_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError) as error:
        family_for(read_config("tiny-gpt2"), max_seq_len=8)
    assert (error.value.code, error.value.where) == ("system.missing-package", "transformers")


def test_parameters_that_files_have_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(transformers.GPT2LMHeadModel):  # as if a version of transformers had changed
        def __init__(self, config: transformers.GPT2Config) -> None:
            config.n_inner = 48
            super().__init__(config)

    monkeypatch.setattr(generic.transformers, "GPT2LMHeadModel", Changed)
    with pytest.raises(InputError) as error:
        family_for(read_config("tiny-gpt2"), max_seq_len=8)
    assert (error.value.code, error.value.where) == ("system.wrong-version", f"transformers {transformers.__version__}")
