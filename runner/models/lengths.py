"""RoPE whose frequencies depend on the length of the whole sequence: `longrope` and `dynamic` of transformers.

# Note [Padding under RoPE that depends on length]
transformers takes the frequencies of every position from the number of tokens in a row, padding included. A row that
is padded beyond a boundary is then another computation than its text alone. Evaluation and generation compute what
the text alone gives: rows are padded only up to where the frequencies stay the same, and rows that differ in that
are computed apart. Training takes all rows at --seq-len, as a trainer on transformers does with right padding.

Source: transformers 5.23, `modeling_rope_utils.py`, `dynamic_rope_update`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def longest_alike(config: Any, length: int, most: int) -> int:
    """Return how many tokens, at most `most`, a row of `length` may be padded to with the same frequencies."""
    for kind, rope in _ropes(config):
        if kind == "longrope" and length <= rope["original_max_position_embeddings"]:
            most = min(most, rope["original_max_position_embeddings"])
        elif "dynamic" in kind:
            most = length if length > config.max_position_embeddings else min(most, config.max_position_embeddings)
    return max(length, most)


def forget_lengths(model: nn.Module) -> None:
    """Let `dynamic` frequencies be those of the next sequence: transformers keeps those of the longest one before."""
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, Mapping) else (("", kinds),):
            if isinstance(kind, str) and "dynamic" in kind:
                prefix = f"{layer_type}_" if layer_type else ""
                setattr(part, f"{prefix}max_seq_len_cached", part.original_max_seq_len)
                setattr(part, f"{prefix}inv_freq", getattr(part, f"{prefix}original_inv_freq"))


def _ropes(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the kind and parameters of each RoPE: one of the model, or one of each type of layers."""
    found = getattr(config, "rope_parameters", None) or {}
    for rope in (found, *found.values()):
        if isinstance(rope, Mapping) and isinstance(kind := rope.get("rope_type"), str):
            yield kind, rope
