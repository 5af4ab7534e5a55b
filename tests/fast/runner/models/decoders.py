"""Tiny decoders that transformers builds, and what puts their weights into chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runner.pipeline.chunk import StageChunk, hf_constants, hf_pieces, materialize
from tests.fast.manifests.models.built import DECODERS, build, perturb, read_config

SEQ_LEN = 48  # more than the tiny windows of 16
CPU = torch.device("cpu")
Variant = tuple[str, Mapping[str, Any]]
VARIANTS: tuple[Variant, ...] = (
    *((name, {}) for name in DECODERS),
    *((name, {"tie_word_embeddings": True}) for name in DECODERS),
    ("tiny-falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("tiny-falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("tiny-falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("tiny-gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 48}),
    ("tiny-mixtral", {"sliding_window": 16}),
    ("tiny-mpt", {"n_heads": 2, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    ("tiny-opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False, "tie_word_embeddings": True}),
    ("tiny-opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("tiny-opt", {"_remove_final_layer_norm": True}),
    ("tiny-phi", {"qk_layernorm": True, "num_key_value_heads": 2}),
    ("tiny-phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3],
                                    "long_factor": [1.0, 2.0, 3.0, 4.0]},
                   "original_max_position_embeddings": 32}),
    ("tiny-qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ("tiny-qwen2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}),
)  # fmt: skip


def variant_ids(variants: Iterable[Variant]) -> list[str]:
    return [" ".join([name, *(f"{key}={value}" for key, value in changes.items())])[:80] for name, changes in variants]


def save_decoder(folder: Path, name: str, **changes: Any) -> None:
    """Save a random model; the biases that steer a choice of experts are random too."""
    model = perturb(build(read_config(name, **changes)))
    generator = torch.Generator().manual_seed(2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) / 10)
    model.save_pretrained(folder)


def name_as_openai_did(folder: Path) -> None:
    """Rewrite a tied GPT-2's file: no prefix, and the causal masks that the model computes."""
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    size = len(tensors["wpe.weight"])
    layers = {name.split(".")[1] for name in tensors if name.startswith("h.")}
    masks = {f"h.{layer}.attn.bias": torch.ones(size, size).tril()[None, None] for layer in layers}
    save_file({**tensors, **masks}, path, {"format": "pt"})


def tied_name(stored: Iterable[str]) -> str:
    """Name the embedding that a tied head takes its weight from."""
    (name,) = (fqn for fqn in stored if fqn.endswith(("wte.weight", "embed_tokens.weight", "word_embeddings.weight")))
    return name


def fill_pieces(chunks: Iterable[StageChunk], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Give chunks memory and, box by box, the weights that the `safetensors` library reads."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
        for chunk in chunks:
            materialize(chunk, device=CPU, dtype=dtype)
            for piece in (*hf_pieces(chunk), *hf_constants(chunk)):
                fqn = piece.fqn if piece.fqn in stored else tied_name(stored)
                box = tuple(
                    slice(begin, begin + size) for begin, size in zip(piece.offset, piece.memory.shape, strict=True)
                )
                assert piece.shape == tuple(file.get_slice(fqn).get_shape())
                piece.memory.copy_(file.get_tensor(fqn)[box])
