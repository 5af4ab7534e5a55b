"""Tiny models of architectures that torchtitan has, too: transformers builds and saves them, and runs batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from runner.data.sequences import IGNORED, Batch
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, hf_pieces
from tests.fast.runner.models.decoders import SEQ_LEN, Variant, fill_pieces, tied_name
from tests.fast.runner.tiny import HEAD, padded_batch, read_config, split_evenly

NOTHING: Mapping[str, object] = MappingProxyType({})
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
MLA_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip
# Sequences are of 48 tokens: longer than windows, and than contexts before they are stretched.
TITANS: tuple[Variant, ...] = (
    ("tiny-llama", {}),
    ("tiny-mistral", {}),
    ("tiny-mistral", {"sliding_window": 16}),
    ("tiny-qwen3", {"tie_word_embeddings": True}),
    ("tiny-qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ("tiny-qwen3", {"rope_scaling": YARN, "max_position_embeddings": 64}),
    ("tiny-qwen3-moe", {}),
    ("tiny-qwen3-moe", {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 16}),
    ("tiny-qwen3-moe", {"moe_intermediate_size": 22, "tie_word_embeddings": True}),  # no width for grouped products
    ("tiny-deepseek-v3", {}),
    ("tiny-deepseek-v3", {"q_lora_rank": None, "rope_scaling": MLA_YARN, "max_position_embeddings": 64}),
    ("tiny-deepseek-v3", {"rope_interleave": False, "norm_topk_prob": False, "n_group": 4, "topk_group": 3}),
    ("tiny-gpt-oss", {}),
    ("tiny-gpt-oss", {"attention_bias": False, "swiglu_limit": 0.5, "layer_types": ["full_attention"] * 4}),
    ("tiny-llama", {"rope_scaling": LLAMA_3, "head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("tiny-llama", {"rope_theta": 500.0, "head_dim": 10, "num_key_value_heads": 4}),
    ("tiny-llama", {"rope_scaling": YARN, "max_position_embeddings": 64}),
)


def load(folder: Path, experts: str | None = "eager") -> Any:
    """Give the model of transformers, in training mode; `experts` says how it computes them, None: as it likes."""
    (architecture,) = read_config(folder)["architectures"]
    model = getattr(transformers, architecture)
    return model.from_pretrained(folder, dtype=torch.float32, experts_implementation=experts).train()


def chunks_of(
    folder: Path,
    num_stages: int,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, object] = NOTHING,
) -> tuple[StageChunk, ...]:
    config = {**read_config(folder), **changes}
    family = family_for(config, max_seq_len=SEQ_LEN)
    stage_modules = split_evenly(family.modules, num_stages)
    chunks = build_chunks(family, stage_modules, range(num_stages))
    fill_pieces(chunks, folder, dtype)
    return chunks


def forward(chunks: Iterable[StageChunk], tokens: torch.Tensor) -> torch.Tensor:
    tensor = tokens
    for chunk in chunks:
        tensor = chunk(tensor)
    return tensor


def batch_of(step: int) -> Batch:
    return padded_batch(step, size=3, seq_len=SEQ_LEN, vocab_size=96)


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)


def in_files(model: Any, folder: Path, *, gradients: bool) -> dict[str, torch.Tensor]:
    """Give weights or gradients under the names that transformers saves weights by."""
    copy = load(folder)
    with torch.no_grad():
        for parameter, other in zip(copy.parameters(), model.parameters(), strict=True):
            parameter.copy_(other.grad if gradients else other)
    copy.save_pretrained(folder / "copy")
    saved = load_file(folder / "copy" / "model.safetensors")
    return {fqn: tensor for fqn, tensor in saved.items() if not (gradients and fqn.endswith("_correction_bias"))}


def gradients_in(chunks: Iterable[StageChunk], *, tied: bool) -> dict[str, torch.Tensor]:
    """Give gradients by Hugging Face name; of a tied pair, the sum."""
    pieces = (piece for chunk in chunks for piece in hf_pieces(chunk, lambda weight: weight.grad))
    found = {piece.fqn: piece.memory for piece in pieces}
    if tied:
        owner = tied_name(found)
        found[owner] = found[owner] + found.pop(HEAD)
    return found


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Give the largest difference, relative to its tensor's norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[fqn] - other).norm() / other.norm()) if other.any() else float(found[fqn].norm())
        for fqn, other in expected.items()
    )
