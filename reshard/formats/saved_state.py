"""A state dict as the files of a DCP folder: chunks as torch.save writes them, and `.metadata`, which lists them.

`Placed` says where a tensor is in the entries of the state dict.

Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from manifests.digest import digest_bytes
from manifests.errors import Parameter, UsageError
from reshard.archives.names import DATA_SUFFIX
from reshard.archives.saved import (
    Call,
    Instance,
    Name,
    SavedFile,
    SavedTensor,
    pickled,
    saved_step,
    saved_tensor,
    saved_value,
    torch_dtype,
)
from reshard.plans.pack_plan import OutputShard, without_header
from reshard.tensors.lazy import Buffer, DerivedFile, MemoryFile, read_blocks
from stores.bundles import TensorAt

_MAX_FILE_NBYTES = 5 << 30
_METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class _At:
    path: str
    begin: int
    nbytes: int


class _Files:
    """The `.distcp` files below `folder`: items follow each other, in files of at most 5 GiB, or of one item."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._contents: list[list[TensorAt]] = []
        self._nbytes = _MAX_FILE_NBYTES

    def add(self, item: TensorAt) -> _At:
        if self._nbytes + item.nbytes > _MAX_FILE_NBYTES:
            self._contents.append([])
            self._nbytes = 0
        self._contents[-1].append(item)
        self._nbytes += item.nbytes
        return _At(self._path(len(self._contents) - 1), self._nbytes - item.nbytes, item.nbytes)

    @property
    def shards(self) -> tuple[OutputShard, ...]:
        return tuple(
            without_header(self._folder + self._path(number), items) for number, items in enumerate(self._contents)
        )

    def _path(self, number: int) -> str:
        return f"__0_{number}{DATA_SUFFIX}"


@dataclass(slots=True)
class _Tensor:
    """An entry of the state dict: chunks of one shape, each stored as a file of torch.save."""

    dtype: str
    whole_shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], tuple[tuple[int, ...], _At]] = field(default_factory=dict)  # by offset


class SavedState:
    """The state dict: where each entry is stored, in files below `folder`. Several may be stored in one place."""

    def __init__(self, folder: str = "") -> None:
        self.files = _Files(folder)
        self._tensors: dict[tuple[str, ...], _Tensor] = {}  # by their keys in nested dicts
        self._values: dict[tuple[str, ...], _At] = {}
        self._written: dict[bytes, _At] = {}

    def add(self, placed: Placed, keys: Callable[[str], tuple[str, ...]]) -> None:
        """Store a tensor; `keys` makes the key of a model's state dict that of the whole one."""
        tensor, count = placed.tensor, len(placed.places[0].offsets)
        saved = saved_tensor(chunk := SavedTensor(tensor.dtype, placed.chunk_shape))
        nbytes = saved.nbytes * count
        how = f"as torch.save writes it, in chunks of {list(chunk.shape)}"
        file = DerivedFile(how, (tensor,), nbytes, partial(_blocks, tensor, saved, [chunk.nbytes] * count))
        name = ".".join(keys(placed.places[0].key))
        begin = self.files.add(TensorAt(f"{name}.{placed.places[0].offsets[0]}", "U8", (nbytes,), file, 0, nbytes))
        for place in placed.places:
            entry = self._tensors.setdefault(keys(place.key), _Tensor(tensor.dtype, place.whole_shape))
            if entry.dtype != tensor.dtype:  # such as of a frozen layer and a trained one
                problem = f"is {tensor.dtype}, and other parts of {place.key!r} are {entry.dtype}"
                hint = f"export one dtype: {Parameter('dtype', 'fp32')}"
                raise UsageError(tensor.place, problem, hint, code="options.array-dtype")
            for number, offset in enumerate(place.offsets):
                at = _At(begin.path, begin.begin + number * saved.nbytes, saved.nbytes)
                entry.chunks[offset] = (placed.chunk_shape, at)

    def add_step(self, keys: tuple[str, ...], step: int) -> None:
        """Store the number of steps that a parameter took, in a tensor as torch's optimizers have it."""
        self._tensors[keys] = _Tensor("F32", (), {(): ((), self._write(saved_step(step)))})

    def add_value(self, keys: tuple[str, ...], value: object) -> None:
        self._values[keys] = self._write(saved_value(value))

    def _write(self, data: bytes) -> _At:
        if data not in self._written:
            file = MemoryFile("a value", data, digest_bytes(data))  # a journal of other values is not resumed
            item = TensorAt(f"value {len(self._written)}", "U8", (len(data),), file, 0, len(data))
            self._written[data] = self.files.add(item)
        return self._written[data]

    @property
    def keys(self) -> list[tuple[str, ...]]:
        return list(self._tensors)

    def metadata(self) -> bytes:
        """Return `.metadata`: a pickle of torch's classes, by name."""
        entries: dict[str, object] = {".".join(keys): _entry(tensor) for keys, tensor in self._tensors.items()}
        entries |= {".".join(keys): Instance(Name(_METADATA, "BytesStorageMetadata")) for keys in self._values}
        stored: dict[object, object] = {}
        for keys, tensor in self._tensors.items():
            for offset, (_, at) in tensor.chunks.items():
                stored[_index(".".join(keys), _size(offset))] = _info(at)
        stored |= {_index(".".join(keys), None): _info(at) for keys, at in self._values.items()}
        state = {
            "state_dict_metadata": entries,
            "planner_data": {".".join(keys): keys for keys in (*self._tensors, *self._values)},
            "storage_data": stored,
            "storage_meta": None,
            "version": "1.0.0",
        }
        return pickled(Instance(Name(_METADATA, "Metadata"), state))


def _blocks(tensor: TensorAt, saved: SavedFile, chunks_nbytes: Sequence[int]) -> Iterator[Buffer]:
    """Yield the files of a tensor's chunks, which are equal parts of its rows."""
    data = _Rows(read_blocks(tensor))
    for nbytes in chunks_nbytes:
        yield from saved.blocks([data.take(nbytes)])
    data.end()


class _Rows:
    """Bytes of a tensor, taken in parts."""

    def __init__(self, blocks: Iterator[memoryview]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def take(self, nbytes: int) -> Iterator[memoryview]:
        while nbytes:
            if not self._rest:
                self._rest = next(self._blocks)
            part, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(part)
            yield part

    def end(self) -> None:
        """Let the reader compare the digest of what was read."""
        assert next(self._blocks, None) is None, "more bytes than planned"


def _size(sizes: Sequence[int]) -> Call:
    return Call(Name("torch", "Size"), (tuple(sizes),))


def _entry(tensor: _Tensor) -> Instance:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = Instance(
        Name(_METADATA, "TensorProperties"), (torch_dtype(tensor.dtype), layout, False, contiguous, False)
    )
    chunks = [
        Instance(Name(_METADATA, "ChunkStorageMetadata"), {"offsets": _size(offset), "sizes": _size(shape)})
        for offset, (shape, _) in sorted(tensor.chunks.items())
    ]
    state = {"properties": properties, "size": _size(tensor.whole_shape), "chunks": chunks}
    return Instance(Name(_METADATA, "TensorStorageMetadata"), state)


def _index(name: str, offset: Call | None) -> Instance:
    return Instance(Name(_METADATA, "MetadataIndex"), {"fqn": name, "offset": offset, "index": None})


def _info(at: _At) -> Instance:
    state = {"relative_path": at.path, "offset": at.begin, "length": at.nbytes}
    return Instance(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)


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
