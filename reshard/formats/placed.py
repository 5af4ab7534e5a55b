"""Where tensors are in the entries of a state dict."""

from __future__ import annotations

from dataclasses import dataclass

from stores.bundles import TensorAt


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in an entry of a state dict: each of its chunks begins at one of `offsets`."""

    key: str
    whole_shape: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor, stored in equal chunks of `chunk_shape`, and the entries that consist of them; its own is the first."""

    tensor: TensorAt
    chunk_shape: tuple[int, ...]
    places: tuple[Place, ...]


def in_place(tensor: TensorAt, key: str) -> Placed:
    """Return a tensor that is all of an entry."""
    return Placed(tensor, tensor.shape, (Place(key, tensor.shape, ((0,) * len(tensor.shape),)),))
