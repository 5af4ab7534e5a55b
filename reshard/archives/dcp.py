"""A folder of torch.distributed.checkpoint: which tensors it has, in which chunks, and where their bytes are.

`.metadata` is a pickle that is read as data; each chunk is a file of torch.save inside of a `.distcp` file. A large
model has ten thousands of chunks, and those of one dtype and shape differ only in their data: what parsing one of them
read is compared with the next.

Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py, filesystem.py and planner_helpers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from manifests.errors import InputError, SourceError
from manifests.paths import problem_with_path
from manifests.safetensors import DTYPE_BITS, MAX_DIM, MAX_RANK
from manifests.slices import Slice
from reshard.archives.names import METADATA_NAME
from reshard.archives.pickled import BadPickleError, Record, read_pickle
from reshard.archives.tensors import VALUES, ArchiveDtype, read_object, read_tensor, read_value
from reshard.archives.zipped import Archive, ZipEntry, archives_in
from reshard.tensors.checksums import with_records
from stores.base import Folder, InputFile, Range, is_hidden, merge_ranges, read_range, read_whole
from stores.bundles import TensorAt

_MAX_NBYTES = 256 << 20
_VERSION = "1.0.0"
# `storage_meta` has names of saves, and `all_local_plans` which rank saved what.
_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "all_local_plans", "version")
_STRIDED = ("torch.strided",)
AGAIN = "the checkpoint is incomplete or damaged; copy or save it again"

Item = tuple[str, str | None]  # an entry's name, and the offset of a chunk
Place = tuple[str, int, int]  # a file, where an item begins in it, and its bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region of a tensor, which is `nbytes` of file `path`, from `begin` on: a file of torch.save by itself."""

    region: Slice
    path: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the checkpoint. `keys` is its place in the nested state dict that was saved."""

    name: str
    keys: tuple[str | int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpValue:
    """An entry of another type: a file of torch.save in `nbytes` of file `path`, from `begin` on."""

    name: str
    keys: tuple[str | int, ...]
    path: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a checkpoint has: tensors, and values of other types by name."""

    tensors: tuple[DcpTensor, ...]
    values: Mapping[str, DcpValue]


@dataclass(frozen=True, slots=True)
class DcpIndex:
    """What `.metadata` lists, which may contradict itself: where items are stored, and the chunks of each entry.

    An item is a chunk, by the name of its tensor and its offset, or an entry of another type, whose regions are None.
    """

    items: Mapping[Item, Place]
    regions: Mapping[str, tuple[Slice, ...] | None]


def read_metadata(folder: Folder) -> DcpMetadata:
    """Return the tensors of a checkpoint, without looking for their files."""
    file = folder.file(METADATA_NAME)
    metadata = _load(file)
    with _expecting_metadata(file):
        metadata.expect(*_FIELDS)
        if (version := metadata.fields.get("version")) not in (None, _VERSION):
            raise BadPickleError(f"version {str(version)[:80]!r}, expected {_VERSION!r}")
        items = {_item(index): _place(info) for index, info in metadata["storage_data"].items()}
        if len(items) < len(metadata["storage_data"]):
            raise BadPickleError("two items of one entry at one offset")
        planner = metadata.fields.get("planner_data") or {}
        # Entries are listed by the rank that saved them, and in the order of the state dict there.
        order = {name: number for number, name in enumerate(planner)}
        entries = sorted(metadata["state_dict_metadata"].items(), key=lambda entry: order.get(entry[0], len(order)))
        keys = {name: _keys(name, planner.get(name, ())) for name, _ in entries}
        return DcpMetadata(
            tensors=tuple(_tensor(name, keys[name], entry, items) for name, entry in entries if _is_tensor(entry)),
            values={name: _value(name, keys[name], entry, items) for name, entry in entries if not _is_tensor(entry)},
        )


def read_index(folder: Folder) -> DcpIndex:
    """Return what a checkpoint's metadata lists."""
    file = folder.file(METADATA_NAME)
    metadata = _load(file)
    with _expecting_metadata(file):
        entries = metadata["state_dict_metadata"].items()
        return DcpIndex(
            items={_item(index): _place(info) for index, info in metadata["storage_data"].items()},
            regions={_text(name): tuple(_regions(entry)) if _is_tensor(entry) else None for name, entry in entries},
        )


@contextmanager
def _expecting_metadata(file: InputFile) -> Iterator[None]:
    """Convert errors about metadata that are malformed."""
    try:
        yield
    except (BadPickleError, AttributeError, TypeError, ValueError, LookupError) as error:
        problem = f"expected the metadata of torch.distributed.checkpoint: {type(error).__name__}: {error}"
        raise SourceError(str(file), problem[:300], AGAIN, code="source.bad-dcp-metadata") from error


def _load(file: InputFile) -> Record:
    raw = read_whole(file, most_nbytes=_MAX_NBYTES)
    with _expecting_metadata(file):
        metadata = read_pickle(raw, VALUES, Record)
        if not isinstance(metadata, Record):
            raise BadPickleError(f"found a {type(metadata).__name__}")
        _check_chunks(metadata["state_dict_metadata"].values())
    return metadata


def read_chunks(folder: Folder, tensors: Mapping[str, DcpTensor]) -> dict[str, list[TensorAt]]:
    """Return the location of each chunk's bytes, tensor by tensor, under the names that the mapping has."""
    wanted: dict[str, dict[Range, list[tuple[str, Chunk]]]] = {}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            _file_of(folder, chunk, tensor.name)
            part = (chunk.begin, chunk.begin + chunk.nbytes)
            wanted.setdefault(chunk.path, {}).setdefault(part, []).append((name, chunk))
    reader = TensorReader()
    located: dict[str, list[TensorAt]] = {name: [] for name in tensors}
    for path, chunks in wanted.items():
        names = {part: tensors[sharing[0][0]].name for part, sharing in chunks.items()}
        for part, at in reader.read(folder.file(path), names):
            for name, chunk in chunks[part]:
                located[name].append(_checked(at, name, tensors[name], chunk))
    return located


def _checked(at: TensorAt, name: str, tensor: DcpTensor, chunk: Chunk) -> TensorAt:
    if (at.dtype, at.shape) != (tensor.dtype, chunk.region.shape):
        expected = f"{tensor.dtype} {list(chunk.region.shape)}"
        problem = f"expected {expected} ({METADATA_NAME}), found {at.dtype} {list(at.shape)}"
        raise SourceError(f"{at.file}: {tensor.name!r}", problem, AGAIN, code="source.bad-archive")
    is_whole = chunk.region.shape == chunk.region.whole_shape and not any(chunk.region.offset)
    part = None if is_whole else chunk.region
    return TensorAt(name, at.dtype, at.shape, at.file, at.begin, at.nbytes, None, part)


def read_values(folder: Folder, values: Iterable[DcpValue]) -> list[object]:
    """Return numbers, strings, and tuples, lists and dicts of them."""
    by_bytes: dict[bytes, object] = {}  # those of the parameters are alike
    read = []
    for value in values:
        file = _file_of(folder, value, value.name)
        if value.nbytes > _MAX_NBYTES:
            problem = f"expected at most {_MAX_NBYTES} bytes, found {value.nbytes} ({METADATA_NAME})"
            raise SourceError(f"{file}: {value.name[:80]!r}", problem, AGAIN, code="source.bad-archive")
        raw = read_range(file, value.begin, value.begin + value.nbytes)
        if raw not in by_bytes:
            by_bytes[raw] = read_value(file, (value.begin, value.begin + value.nbytes))
        read.append(by_bytes[raw])
    return read


def read_entry_object(folder: Folder, value: DcpValue) -> object:
    """Return what torch.save wrote of an entry; objects of other classes are their fields."""
    part = (value.begin, value.begin + value.nbytes)
    return read_object(_file_of(folder, value, value.name), value.name, part)


def _file_of(folder: Folder, item: Chunk | DcpValue, name: str) -> InputFile:
    """Return the file of an item, which must be long enough."""
    file = folder.file(item.path)
    try:
        file_nbytes = file.nbytes
    except InputError:
        if item.path in folder.names():
            raise
        problem = f"no such file, which has {name!r}"
        raise SourceError(f"{folder}/{item.path}", problem, AGAIN, code="source.missing-shard") from None
    if item.begin + item.nbytes > file_nbytes:
        problem = f"expected at least {item.begin + item.nbytes} bytes ({METADATA_NAME}), found {file_nbytes}"
        raise SourceError(str(file), problem, AGAIN, code="source.bad-archive")
    return file


def _check_chunks(entries: Iterable[Record]) -> None:
    """Refuse a chunk that is listed twice: two entries, or many, may have one list of many chunks."""
    seen: set[int] = set()
    for entry in entries:
        for chunk in entry.fields.get("chunks", ()):
            if id(chunk) in seen:
                raise BadPickleError("a chunk that is in two places")
            seen.add(id(chunk))


def _keys(name: object, keys: object) -> tuple[str | int, ...]:
    """Return the place of an entry in the nested state dict, which only some planners say."""
    entry = _text(name)
    if not isinstance(keys, tuple) or len(keys) > MAX_RANK or not all(isinstance(key, str | int) for key in keys):
        raise BadPickleError(f"{entry[:80]!r} has a place in the state dict that is not of keys")
    return keys or (entry,)


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise BadPickleError(f"an entry or an item whose name is a {type(name).__name__}")
    return name


def _is_tensor(entry: Record) -> bool:
    return "chunks" in entry.fields


def _item(index: Record) -> Item:
    """Return which chunk of which entry an item is; only those of tensors have an offset.

    The offset is a text since Python hashes numbers without a secret: they could be chosen to collide.
    """
    index.expect("fqn", "offset", "index")  # the last is where to look first in a list of chunks
    offset = index.fields.get("offset")
    return _text(index["fqn"]), None if offset is None else str(_counts(offset))


def _place(info: Record) -> Place:
    info.expect("relative_path", "offset", "length", "transform_descriptors")
    path, begin, nbytes = info["relative_path"], info["offset"], info["length"]
    if not isinstance(path, str) or not _is_in_folder(path):
        raise BadPickleError(f"a file named {path[:80]!r}" if isinstance(path, str) else "a file without a name")
    begin, nbytes = _counts((begin, nbytes))
    if info.fields.get("transform_descriptors"):
        raise BadPickleError("items that are compressed or otherwise transformed, which is not supported")
    return path, begin, nbytes


@lru_cache(maxsize=4096)  # thousands of chunks are in each file
def _is_in_folder(path: str) -> bool:
    return problem_with_path(path) is None and not is_hidden(path)


def _tensor(name: str, keys: tuple[str | int, ...], entry: Record, items: Mapping[Item, Place]) -> DcpTensor:
    entry.expect("properties", "size", "chunks")
    whole, dtype = _counts(entry["size"]), _dtype(name, entry["properties"])
    if prod(filter(None, whole)) * DTYPE_BITS[dtype] >= MAX_DIM:
        raise BadPickleError(f"{name[:80]!r} is larger than any tensor")
    chunks = []
    for region in _regions(entry):
        if not len(region.offset) == len(region.shape) == len(whole):
            raise BadPickleError(f"{name[:80]!r} has a chunk with another number of dimensions")
        if (item := (name, str(region.offset))) not in items:
            raise BadPickleError(f"a chunk of {name[:80]!r}, at {list(region.offset)}, is stored in no file")
        chunks.append(Chunk(region, *items[item]))
    if not chunks:
        raise BadPickleError(f"{name[:80]!r} has no chunks")
    return DcpTensor(name, keys, dtype, tuple(chunks))


def _regions(entry: Record) -> Iterator[Slice]:
    whole = _counts(entry["size"])
    for chunk in entry["chunks"]:
        chunk.expect("offsets", "sizes")
        yield Slice(offset=_counts(chunk["offsets"]), shape=_counts(chunk["sizes"]), whole_shape=whole)


def _value(name: str, keys: tuple[str | int, ...], entry: Record, items: Mapping[Item, Place]) -> DcpValue:
    entry.expect()
    if (name, None) not in items:
        raise BadPickleError(f"{name[:80]!r} is stored in no file")
    return DcpValue(name, keys, *items[name, None])


def _dtype(name: str, properties: Record) -> str:
    """Return the dtype of a tensor. Its chunks say where their elements are, and no file says where it was."""
    properties.expect("state")
    match properties["state"]:
        case (ArchiveDtype(str(dtype)), Record(args=layout), bool(), Record(), bool()) if layout == _STRIDED:
            return dtype
    raise BadPickleError(f"{name[:80]!r} has a dtype or a layout that is not supported")


def _counts(counts: object) -> tuple[int, ...]:
    if not isinstance(counts, tuple | list) or len(counts) > MAX_RANK:
        raise BadPickleError("a size or an offset that is not of few numbers")
    if not all(type(count) is int and 0 <= count < MAX_DIM for count in counts):
        raise BadPickleError("a size or an offset that is not of counts")
    return tuple(counts)


_MOST_SAMPLES = 8  # of one length: shapes of as many elements, and the names that writers give the folder in the file


class _Sample(NamedTuple):
    """The bytes that were read of an archive, its tensor, and the entry of its bytes if that has a checksum.

    Positions are from its beginning.
    """

    pieces: Sequence[tuple[int, bytes]]
    tensor: TensorAt
    record: ZipEntry | None


class TensorReader:
    """Reads archives of one tensor each, and remembers what those that it parsed looked like."""

    def __init__(self) -> None:
        self._samples: dict[int, list[_Sample]] = {}  # by the length of the archive

    def read(self, file: InputFile, names: Mapping[Range, str]) -> Iterator[tuple[Range, TensorAt]]:
        """Yield the tensor in each part of a file, in order, under its name."""
        for archive in archives_in(with_records(file), list(names)):
            part = (archive.begin, archive.end)
            yield part, self._tensor_in(archive, names[part])

    def _tensor_in(self, archive: Archive, name: str) -> TensorAt:
        samples = self._samples.setdefault(archive.end - archive.begin, [])
        for pieces, like, record in samples:
            if archive.has(pieces):
                if record is not None:
                    crc_begin, crc_end = (archive.begin + at for at in record.crc_at)
                    crc = int.from_bytes(archive.read_range(crc_begin, crc_end), "little")
                    archive.file.add(record.name, archive.begin + record.begin, archive.begin + record.end, crc)
                return TensorAt(name, like.dtype, like.shape, archive.file, archive.begin + like.begin, like.nbytes)
        tensor = read_tensor(archive, name)
        if tensor.file is archive.file and len(samples) < _MOST_SAMPLES:  # not if it is gathered
            record = _record_of(archive, tensor)
            like = replace(tensor, begin=tensor.begin - archive.begin)
            samples.append(_Sample(list(_pieces(archive, [] if record is None else archive.checksums)), like, record))
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
