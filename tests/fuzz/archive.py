"""Fuzz targets: a file of torch.save, its pickle, and `.metadata` of DCP.

What the readers accept lies within the files; nothing in a pickle is run.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from manifests.errors import UserError
from manifests.paths import problem_with_path
from reshard.archives.dcp import read_metadata
from reshard.archives.pickled import BadPickleError, read_pickle
from reshard.archives.tensors import read_archive
from reshard.tensors.lazy import read_blocks
from stores.base import Range

__all__ = ["check", "check_metadata", "check_pickle", "metadata", "pickles", "seeds"]

_READ_NBYTES = 1 << 20


@dataclass(frozen=True)
class Bytes:
    """A file in memory, read at any place; reading beyond its end is our bug."""

    data: bytes
    fingerprint: str = ""

    def __str__(self) -> str:
        return "f"

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def open(self, ranges: Sequence[Range]) -> Bytes:
        return self

    def read_into(self, part: memoryview, position: int) -> None:
        assert 0 <= position <= position + len(part) <= len(self.data)
        part[:] = self.data[position : position + len(part)]

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Alone:
    """A folder of one file, under each name."""

    data: bytes
    kind: str = "huggingface"
    location: str = "d"
    revision: None = None

    def names(self) -> tuple[str, ...]:
        return ()

    def file(self, name: str) -> Bytes:
        return Bytes(self.data)


def check(file: bytes) -> None:
    """Raise AssertionError unless the file is refused, or its tensors are read whole, from bytes that are there."""
    try:
        tensors = read_archive(Bytes(file))
    except UserError:
        return
    for tensor in tensors:
        if tensor.nbytes <= _READ_NBYTES:
            assert sum(len(block) for block in read_blocks(tensor)) == tensor.nbytes
        if isinstance(tensor.file, Bytes):
            assert 0 <= tensor.begin <= tensor.end <= len(file)


def check_pickle(data: bytes) -> None:
    """Raise AssertionError unless the pickle is refused, or built of plain values alone."""
    try:
        found = read_pickle(data, {"collections.OrderedDict": dict})
    except BadPickleError:
        return
    assert type(found).__module__ in ("builtins", "reshard.archives.pickled")


def check_metadata(data: bytes) -> None:
    """Raise AssertionError unless the metadata is refused, or its chunks are regions of tensors, in files inside."""
    try:
        found = read_metadata(Alone(data))
    except UserError:
        return
    for tensor in found.tensors:
        for chunk in tensor.chunks:
            region = chunk.region
            assert len(region.offset) == len(region.shape) == len(region.whole_shape)
            assert min(chunk.begin, chunk.nbytes, *region.shape, *region.offset) >= 0
            assert not problem_with_path(chunk.path)


def metadata() -> tuple[bytes, ...]:
    """Return the metadata of a checkpoint of a tensor in two chunks, and of a value, by two protocols."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in range(2)]
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 3]), chunks)
    places = {MetadataIndex("w", chunk.offsets, number): number for number, chunk in enumerate(chunks)}
    found = Metadata(
        state_dict_metadata={"w": tensor, "step": BytesStorageMetadata()},
        planner_data={"w": ("model", "w")},
        storage_data={
            index: _StorageInfo("__0_0.distcp", 1000 * number, 1000)
            for index, number in {**places, MetadataIndex("step"): 2}.items()
        },
    )
    return pickle.dumps(found), pickle.dumps(found, 2)


def seeds() -> tuple[bytes, ...]:
    """Return files that torch wrote: tensors of several dtypes, views, shared storages, parameters, none at all."""
    base = torch.arange(12, dtype=torch.int16).view(3, 4)
    states = ({}, {"a": base, "b": base[1:].T}, {"c": torch.nn.Parameter(torch.ones(2)), "d": torch.ones(1).bfloat16()})
    return tuple(map(_saved, states))


def pickles() -> tuple[bytes, ...]:
    """Return the pickles in these files."""
    found = []
    for seed in seeds():
        with zipfile.ZipFile(io.BytesIO(seed)) as archive:
            found += [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    return (*found, b"\x80\x04}\x94(\x8c\x01a\x94]\x94K\x01au.")


def _saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
