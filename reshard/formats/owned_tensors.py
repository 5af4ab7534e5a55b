"""Tied tensors of an export, for formats that have each of them once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.tensors.checkpoint import Checkpoint
from stores.bundles import TensorAt


def owned_tensors(checkpoint: Checkpoint, tensors: Mapping[str, TensorAt]) -> dict[str, TensorAt]:
    """Return the tensors, each tied one once, under its owner's name, and none that the model recomputes."""
    owners = {fqn: group[0] for group in checkpoint.shape.ties for fqn in group}
    ignored = checkpoint.shape.ignored_suffixes or ("\0",)
    found: dict[str, TensorAt] = {}
    for fqn, tensor in tensors.items():
        owner = owners.get(fqn, fqn)
        if not fqn.endswith(ignored) and owner not in found:
            found[owner] = tensor if owner == fqn else replace(tensor, name=owner)
    return found
