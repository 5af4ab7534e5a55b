"""Many tensors that torch.save wrote: those of one dtype and shape are in files that differ only in their data.

A checkpoint of a large model has ten thousands of them. What parsing one of them read is compared with the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.archives.tensors import read_tensor
from reshard.archives.zipped import Archive, ZipEntry, archives_in
from reshard.tensors.checksums import with_records
from stores.base import InputFile, Range, merge_ranges
from stores.bundles import TensorAt

_MOST_KNOWN = 8  # of one length: shapes of as many elements, and the names that writers give the folder in the file


class _Known(NamedTuple):
    """The bytes that were read of an archive, its tensor, and the entry of its bytes if that has a checksum.

    Positions are from its beginning.
    """

    pieces: Sequence[tuple[int, bytes]]
    tensor: TensorAt
    record: ZipEntry | None


class TensorReader:
    """Reads archives of one tensor each, and remembers what those that it parsed looked like."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}  # by the length of the archive

    def read(self, file: InputFile, names: Mapping[Range, str]) -> Iterator[tuple[Range, TensorAt]]:
        """Yield the tensor in each part of a file, in order, under its name.

        Raises:
            SourceError, InputError: as `read_tensor`.
        """
        for archive in archives_in(with_records(file), list(names)):
            part = (archive.begin, archive.end)
            yield part, self._tensor_in(archive, names[part])

    def _tensor_in(self, archive: Archive, name: str) -> TensorAt:
        known = self._known.setdefault(archive.end - archive.begin, [])
        for pieces, like, record in known:
            if archive.has(pieces):
                if record is not None:
                    crc_begin, crc_end = (archive.begin + at for at in record.crc_at)
                    crc = int.from_bytes(archive.read_range(crc_begin, crc_end), "little")
                    archive.file.add(record.name, archive.begin + record.begin, archive.begin + record.end, crc)
                return TensorAt(name, like.dtype, like.shape, archive.file, archive.begin + like.begin, like.nbytes)
        tensor = read_tensor(archive, name)
        if tensor.file is archive.file and len(known) < _MOST_KNOWN:  # not if it is gathered
            record = _record_of(archive, tensor)
            like = replace(tensor, begin=tensor.begin - archive.begin)
            known.append(_Known(list(_pieces(archive, [] if record is None else archive.checksums)), like, record))
        return tensor


def _record_of(archive: Archive, tensor: TensorAt) -> ZipEntry | None:
    """Return the entry of a tensor's bytes, from the beginning of the archive; None if it has no checksum."""
    entries = (entry for entry in archive.entries.values() if entry.begin <= tensor.begin < entry.end)
    record = next(entries, None)
    return None if record is None or record.crc is None else replace(record, begin=record.begin - archive.begin)


def _pieces(archive: Archive, skipped: Sequence[Range]) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes that were used of an archive, but for what may differ in others: checksums of tensors."""
    skipped = sorted(skipped)
    for begin, end in merge_ranges(archive.used):
        for first, last in skipped:
            if begin <= first and last <= end:
                yield begin, archive.read_range(archive.begin + begin, archive.begin + first)
                begin = last
        yield begin, archive.read_range(archive.begin + begin, archive.begin + end)
