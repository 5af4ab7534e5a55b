"""Fuzz targets: a file of torch.save, one of a tensor after others like it, its pickle, and `.metadata` of DCP.

What the readers accept lies within the files; nothing in a pickle is run.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

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
from reshard.archives.dcp import TensorReader, read_metadata
from reshard.archives.pickled import BadPickleError, Record, check_repeats, read_pickle
from reshard.archives.tensors import VALUES, read_archive, read_object, read_tensor
from reshard.archives.zipped import archives_in
from reshard.formats.dcp.read import check as check_dcp
from reshard.formats.table import CheckOptions
from reshard.tensors.checksums import with_records
from reshard.tensors.comparison import Findings
from reshard.tensors.lazy import read_blocks
from stores.base import Range
from stores.bundles import TensorAt

_READ_NBYTES = 1 << 20
_NAMED = list(VALUES.values())


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
    with suppress(UserError):
        repr(read_object(Bytes(file), "f"))
    try:
        tensors = read_archive(Bytes(file))
    except UserError:
        return
    for tensor in tensors:
        if tensor.nbytes <= _READ_NBYTES:
            assert sum(len(block) for block in read_blocks(tensor)) == tensor.nbytes
        if isinstance(tensor.file, Bytes):
            assert 0 <= tensor.begin <= tensor.end <= len(file)


def check_alike(file: bytes) -> None:
    """Raise AssertionError unless a reader that has parsed files of one tensor reads another as if it had not."""
    before = alone()
    ends = list(accumulate(map(len, (*before, file)), initial=0))
    *known, part = pairwise(ends)
    whole = with_records(Bytes(b"".join((*before, file))))

    def parsed() -> TensorAt:
        (archive,) = archives_in(whole, [part])
        return read_tensor(archive, "w")

    def after_others() -> TensorAt:
        return dict(TensorReader().read(whole, dict.fromkeys((*known, part), "w")))[part]

    assert _outcome(after_others) == _outcome(parsed)


def _outcome(read: Callable[[], TensorAt]) -> object:
    try:
        found = read()
    except UserError as error:
        return error.code
    return found.dtype, found.shape, found.begin, found.nbytes, type(found.file)


def check_pickle(data: bytes) -> None:
    """Raise AssertionError unless the pickle is refused, or built of plain values alone."""
    for unknown in (None, Record):
        with suppress(BadPickleError):
            found = read_pickle(data, VALUES, unknown)
            assert type(found).__module__ in ("builtins", "reshard.archives.pickled", "reshard.archives.tensors")
            check_repeats(found)
            repr(found)
    assert list(VALUES.values()) == _NAMED


def check_metadata(data: bytes) -> None:
    """Raise AssertionError unless the metadata is refused, or its chunks are regions of tensors, in files inside."""
    with suppress(UserError):
        check_dcp(Alone(data), Findings(), CheckOptions())
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


@cache
def alone() -> tuple[bytes, ...]:
    """Return files that torch wrote of a tensor each, one of which is longer than what is read of its ends at once."""
    values = torch.arange(12, dtype=torch.float32)
    return tuple(map(_saved, (values, values.view(3, 4), values.view(4, 3).T, values.half(), torch.zeros(4000).half())))


def pickles() -> tuple[bytes, ...]:
    """Return the pickles in these files."""
    found = []
    for seed in seeds():
        with zipfile.ZipFile(io.BytesIO(seed)) as archive:
            found += [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    doubled = b"\x80\x04K\x01\x85\x94h\x00h\x00\x86\x94h\x01h\x01\x86\x94]\x94(h\x00h\x02e\x94}h\x01h\x03s."
    return (*found, b"\x80\x04}\x94(\x8c\x01a\x94]\x94K\x01au.", doubled)


def _saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
