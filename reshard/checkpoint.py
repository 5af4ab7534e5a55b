"""A checkpoint as a table: where each tensor lies, and what else came with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manifests.models import ModelShape
from manifests.safetensors import Header
from manifests.schema import Manifest, Parent, Source
from reshard.record import SourceRecord
from stores.base import InputFile

__all__ = ["CarriedAt", "Checkpoint", "TensorAt", "tensors_in"]


@dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor's bytes in a file. `digest` is bare hex, None where nobody has computed it yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: InputFile
    begin: int  # from the start of the file, in bytes
    nbytes: int
    digest: str | None = None


def tensors_in(file: InputFile, header: Header, digests: Mapping[str, str] | None = None) -> list[TensorAt]:
    """Give a shard's tensors in the order of their bytes."""
    return [
        TensorAt(
            entry.name,
            entry.dtype,
            entry.shape,
            file,
            header.nbytes + entry.begin,
            entry.nbytes,
            digests[entry.name] if digests else None,
        )
        for entry in sorted(header.tensors, key=lambda entry: (entry.begin, entry.end))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedAt:
    """A small file that travels with the weights: its path in the checkpoint, and where it is now."""

    path: str
    file: InputFile
    digest: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Everything known of a source before a tensor is read.

    `tensors` holds each stored FQN once; a tied FQN that no file stores is absent.
    """

    shape: ModelShape
    tensors: Mapping[str, TensorAt]
    carried: tuple[CarriedAt, ...]
    record: SourceRecord
    source: Source
    parents: tuple[Parent, ...] = ()
    manifest: Manifest | None = None  # when the source is a manifest
