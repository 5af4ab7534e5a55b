"""Tiny Llamas that `transformers` builds and saves, and what puts their weights into chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from manifests.schema import Shard, TieGroup, TieMember
from runner.checkpoint import shard_file
from runner.data.sequences import IGNORED, Batch
from runner.distributed.rounds import run_beside_training
from runner.pipeline.chunk import StageChunk, materialize, named_hf_parameters

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CPU = torch.device("cpu")
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


def save_model(folder: Path, **overrides: Any) -> LlamaForCausalLM:
    """Save a random model whose norms are not all ones, and give it."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import, and ranks do without

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **overrides}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    model.save_pretrained(folder)
    return model


def load_model(folder: Path) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM

    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def fill(chunks: Iterable[StageChunk], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Give chunks memory and the weights that the `safetensors` library reads."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
        for chunk in chunks:
            materialize(chunk, device=CPU, dtype=dtype)
            for fqn, parameter in named_hf_parameters(chunk):
                name = EMBEDDING if fqn == HEAD and HEAD not in stored else fqn
                parameter.data.copy_(file.get_tensor(name))


def split_evenly(modules: Sequence[str], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Cut a model into stages of as equal a number of modules as there can be."""
    bounds = [round(len(modules) * stage / num_stages) for stage in range(num_stages + 1)]
    return tuple(tuple(modules[begin:end]) for begin, end in pairwise(bounds))


def head_tie(stage_modules: Sequence[tuple[str, ...]]) -> TieGroup:
    """Tie the embedding, which runs first, to the head, wherever they are."""
    embedding = next(module for modules in stage_modules for module in modules) + ".weight"

    def stage_of(fqn: str) -> int:
        return next(i for i, names in enumerate(stage_modules) if fqn.removesuffix(".weight") in names)

    owner, replica = (TieMember(fqn=fqn, stage=stage_of(fqn)) for fqn in (embedding, HEAD))
    return TieGroup(owner=owner, replicas=(replica,))


def padded_batch(step: int, *, size: int = 8, seq_len: int = 32, vocab_size: int = 320) -> Batch:
    """Random tokens, with padding so uneven that microbatches differ much in valid tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab_size, (size, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row, length in enumerate(torch.randint(1, seq_len + 1, (size,), generator=generator)):
        labels[row, int(length) :] = IGNORED
    return Batch(tokens=tokens[:, :-1].contiguous(), labels=labels, num_tokens=int((labels != IGNORED).sum()))


def write_shard(*args: Any, **options: Any) -> Shard:
    """Write a shard as `runner.checkpoint.shard_file.write_shard`, all of it here."""
    return run_beside_training(shard_file.write_shard(*args, **options), lambda: True)
