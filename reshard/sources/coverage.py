"""Law 1, coverage: whether stored tensors are exactly those that the architecture has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manifests.models import ModelShape
from manifests.models.catalogue import entry_of
from stores.bundles import TensorAt


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """The FQNs that are missing, that the architecture does not have, and whose shape is another one."""

    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    misshapen: tuple[str, ...]


def compare_with_shape(tensors: Mapping[str, TensorAt], shape: ModelShape) -> Coverage:
    """Compare tensors, by FQN, with an architecture. One copy of a tie group is enough."""
    tied = {fqn for group in shape.ties if any(name in tensors for name in group) for fqn in group}
    ignored = shape.ignored_suffixes or ("\0",)
    return Coverage(
        missing=tuple(fqn for fqn in shape.tensors if fqn not in tensors and fqn not in tied),
        unknown=tuple(fqn for fqn in tensors if fqn not in shape.tensors and not fqn.endswith(ignored)),
        misshapen=tuple(fqn for fqn, tensor in tensors.items() if tensor.shape != shape.tensors.get(fqn, tensor.shape)),
    )


def hint_for_unknown(architecture: str, fqn: str) -> str:
    """Return what to do about a tensor that the model does not have: not to drop what it has with another config."""
    entry, hint = entry_of(architecture), "download weights and config from one revision"
    return hint if entry is not None and entry.has(fqn) else f"{hint}, or use --drop {fqn}"
