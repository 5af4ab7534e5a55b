"""Fuzz target: a file of torch.save. What the reader accepts lies within the file; nothing in a pickle is run."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manifests.errors import UserError
from reshard.archives.pickled import BadPickleError, read_pickle
from reshard.archives.tensors import read_archive
from reshard.tensors.lazy import read_blocks
from stores.base import Range

__all__ = ["check", "check_pickle", "pickles", "seeds"]

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
