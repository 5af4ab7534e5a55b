"""What the memory ranks train: dtypes, parallel degrees and activation checkpointing, by the flags of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Case = Mapping[str, Any]

# About 60 million parameters; the tied embedding, which both ends have, is a ninth of them. Most tensors are so large
# that malloc returns them to the system as soon as they are freed.
SIZES: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2112,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
_DTYPES: Mapping[str, Sequence[str]] = {
    "fp32": (),
    "bf16": ("--dtype", "bf16"),
    "mixed": ("--dtype", "bf16", "--master-dtype", "fp32"),
}
# The flags, and the global batch size: of every pipeline, 4 microbatches.
_DEGREES: Mapping[str, Sequence[str]] = {
    "pp": ("--global-batch", "4"),
    "fsdp": ("--global-batch", "8", "--dp-shard", "2"),
    "tp": ("--global-batch", "4", "--tp", "2"),
}
_RECOMPUTE: Mapping[str, Sequence[str]] = {
    "none": (),
    "full": ("--ac", "full"),
    "selective": ("--ac", "selective"),
    "chunks": ("--loss-chunk", "64"),
}


def _case(dtype: str, degrees: str, recompute: str, seq_len: int = 192) -> Case:
    flags = (*_DTYPES[dtype], *_DEGREES[degrees], *_RECOMPUTE[recompute])
    return {"name": f"{dtype}-{degrees}-{recompute}-{seq_len}", "args": ["--seq-len", str(seq_len), *flags]}


# By dtype, each of which gets ranks of its own: the heap of a rank keeps the shape that blocks of another size gave it.
PIPELINE = {dtype: [_case(dtype, "pp", recompute) for recompute in _RECOMPUTE] for dtype in _DTYPES}
SHARED = {
    dtype: [_case(dtype, degrees, recompute) for degrees in ("fsdp", "tp") for recompute in ("none", "full")]
    for dtype in _DTYPES
}
SAMPLE = [_case("fp32", "pp", "none")]
# Ranks that reuse freed memory: of another case before, too. So each gets ranks of its own.
REUSING = [*PIPELINE["fp32"][1:], _case("fp32", "pp", "none", 768)]


def warm_up(num_ranks: int, dtype: str) -> Sequence[Case]:
    """What torch, gloo and oneDNN allocate at their first use stays out of the figures."""
    return [_case(dtype, degrees, "full", 64) for degrees in (("pp",) if num_ranks == 2 else ("fsdp", "tp"))]
