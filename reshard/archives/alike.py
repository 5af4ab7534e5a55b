"""Many tensors that torch.save wrote: those of one dtype and shape are in files that differ only in their data.

A checkpoint of a large model has ten thousands of them. What parsing one of them read is compared with the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.archives.tensors import read_tensor
from reshard.archives.zipped import Archive, archives_in
from reshard.tensors.checkpoint import TensorAt
from stores.base import InputFile, Range, merge_ranges

__all__ = ["TensorReader"]

_MOST_KNOWN = 8  # of one length: shapes of as many elements, and the names that writers give the folder in the file


class _Known(NamedTuple):
    """The bytes that were read of an archive, without checksums, and its tensor; positions are from its beginning."""

    pieces: Sequence[tuple[int, bytes]]
    tensor: TensorAt


class TensorReader:
    """Reads archives of one tensor each, and remembers what those that it parsed looked like."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}  # by the length of the archive

    def read(self, file: InputFile, names: Mapping[Range, str]) -> Iterator[tuple[Range, TensorAt]]:
        """Yield the tensor in each part of a file, in order, under its name.

        Raises:
            SourceError, InputError: as `read_tensor`.
        """
        for archive in archives_in(file, list(names)):
            part = (archive.begin, archive.end)
            yield part, self._tensor_in(archive, names[part])

    def _tensor_in(self, archive: Archive, name: str) -> TensorAt:
        known = self._known.setdefault(archive.end - archive.begin, [])
        for pieces, like in known:
            if archive.has(pieces):
                return TensorAt(name, like.dtype, like.shape, archive.file, archive.begin + like.begin, like.nbytes)
        tensor = read_tensor(archive, name)
        if tensor.file is archive.file and len(known) < _MOST_KNOWN:  # not if it is gathered
            known.append(_Known(list(_pieces(archive)), replace(tensor, begin=tensor.begin - archive.begin)))
        return tensor


def _pieces(archive: Archive) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes that were used of an archive, but for checksums, which nobody looked at."""
    skipped = sorted(archive.checksums)
    for begin, end in merge_ranges(archive.used):
        for first, last in skipped:
            if begin <= first and last <= end:
                yield begin, archive.read_range(archive.begin + begin, archive.begin + first)
                begin = last
        yield begin, archive.read_range(archive.begin + begin, archive.begin + end)
