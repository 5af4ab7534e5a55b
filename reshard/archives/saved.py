"""Files as torch.save writes them: uncompressed zip files of a pickle and the bytes of a tensor.

A pickle has plain values, and objects of classes that are named and not imported, in protocol 2, as torch.save writes.

Source: torch 2.13.0, torch/serialization.py and caffe2/serialize/inline_container.cc; PKWARE's APPNOTE 6.3.10;
CPython 3.11, Lib/pickletools.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import prod
from struct import pack
from zlib import crc32

from manifests.safetensors import nbytes_of
from reshard.archives.tensors import DTYPES, STORAGE_CLASSES
from reshard.tensors.lazy import Buffer

_FOLDER = "archive"
_ALIGNMENT = 64  # of a tensor's bytes
_PADDING_ID = b"FB"
_MAX32 = 0xFFFFFFFF
_MAX16 = 0xFFFF
_HAS_DESCRIPTOR = 8  # flag: CRC and sizes follow the data
_DATE = 33  # 1980-01-01
TORCH_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CLASSES = {dtype: f"{name}Storage" for name, dtype in STORAGE_CLASSES.items()}


def torch_dtype(dtype: str) -> Name:
    return Name("torch", TORCH_NAMES[dtype])


@dataclass(frozen=True, slots=True)
class SavedTensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    def pickled_as(self, key: str) -> Call:
        """Return what a pickle has for a tensor whose bytes are the entry `data/KEY`."""
        hooks = Call(Name("collections", "OrderedDict"))
        strides = tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        count = prod(self.shape)
        if self.dtype in _CLASSES:
            storage = Persistent(("storage", Name("torch", _CLASSES[self.dtype]), key, "cpu", count))
            return Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, 0, self.shape, strides, False, hooks))
        untyped = ("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", self.nbytes)
        view = (Persistent(untyped), 0, self.shape, strides, False, hooks, torch_dtype(self.dtype))
        return Call(Name("torch._utils", "_rebuild_tensor_v3"), view)


class SavedFile:
    """A file of a value and of tensors in it. Its size depends on none of their bytes."""

    def __init__(self, value: object, tensors: Sequence[SavedTensor] = ()) -> None:
        writer, self._num_tensors = _Writer(), len(tensors)
        writer.add("data.pkl", pickled(value))
        writer.add("byteorder", b"little")
        writer.add("version", b"3\n")
        self._starts: list[bytes] = []  # what precedes each tensor's bytes, but for what describes those of another
        for number, tensor in enumerate(tensors):
            writer.begin_data(f"data/{number}", tensor.nbytes)
            self._starts.append(writer.flushed())
            writer.skip(tensor.nbytes + len(_described(writer.entries[-1])))
        self._rest = writer.flushed()  # of a value without tensors
        self._entries, self._end_at = writer.entries, writer.position
        self.nbytes = writer.position + len(_directory(self._entries, writer.position))

    def blocks(self, data: Iterable[Iterator[Buffer]] = ()) -> Iterator[Buffer]:
        """Yield the file, given the bytes of each tensor."""
        entries = self._entries[: len(self._entries) - self._num_tensors]
        for start, entry, blocks in zip(self._starts, self._entries[len(entries) :], data, strict=True):
            yield start
            crc = 0
            for block in blocks:
                crc = crc32(block, crc)
                yield block
            entries = [*entries, replace(entry, crc=crc)]
            yield _described(entries[-1])
        yield self._rest + _directory(entries, self._end_at)


def saved_tensor(tensor: SavedTensor) -> SavedFile:
    return SavedFile(tensor.pickled_as("0"), [tensor])


def saved_dict(tensors: Mapping[str, SavedTensor], values: Mapping[str, object]) -> SavedFile:
    """Return the file of a dict of tensors, and of numbers, strings and containers of them."""
    pickles = {name: tensor.pickled_as(str(number)) for number, (name, tensor) in enumerate(tensors.items())}
    return SavedFile({**values, **pickles}, tuple(tensors.values()))


def saved_step(step: int) -> bytes:
    """Return the file of the number of steps that a parameter took, as torch's optimizers have it."""
    return b"".join(map(bytes, saved_tensor(SavedTensor("F32", ())).blocks([iter((pack("<f", step),))])))


def saved_value(value: object) -> bytes:
    """Return the file of a number, a string, or a container of them."""
    return b"".join(map(bytes, SavedFile(value).blocks()))


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    begin: int  # of its local header
    nbytes: int
    crc: int
    flags: int = 0

    @property
    def is_large(self) -> bool:
        return self.nbytes >= _MAX32

    @property
    def directory(self) -> bytes:
        """Its entry in the central directory."""
        sizes = (self.nbytes, self.nbytes) if self.is_large else ()
        far = (self.begin,) if self.begin >= _MAX32 else ()
        extra = pack(f"<HH{len(sizes + far)}Q", 1, 8 * len(sizes + far), *sizes, *far) if sizes + far else b""
        nbytes = min(self.nbytes, _MAX32)
        version = 45 if extra else 20
        fixed = pack(
            "<4s6H3I5H2I", b"PK\1\2", version, version, self.flags, 0, 0, _DATE, self.crc, nbytes, nbytes,
            len(self.name), len(extra), 0, 0, 0, 0, min(self.begin, _MAX32),
        )  # fmt: skip
        return fixed + self.name + extra


class _Writer:
    """The start of a zip file: entries whose bytes are known, and the headers of those whose bytes follow."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.entries: list[_Entry] = []
        self._num_before = 0

    @property
    def position(self) -> int:
        return self._num_before + len(self.written)

    def flushed(self) -> bytes:
        """Return what was written since the last call."""
        written = bytes(self.written)
        self.skip(len(written))
        self.written.clear()
        return written

    def skip(self, nbytes: int) -> None:
        """Leave space for bytes that another writes."""
        self._num_before += nbytes

    def add(self, name: str, data: bytes) -> None:
        entry = _Entry(f"{_FOLDER}/{name}".encode(), self.position, len(data), crc32(data))
        self._header(entry, b"")
        self.written += data

    def begin_data(self, name: str, nbytes: int) -> None:
        entry = _Entry(f"{_FOLDER}/{name}".encode(), self.position, nbytes, 0, _HAS_DESCRIPTOR)
        extra = pack("<HHQQ", 1, 16, 0, 0) if entry.is_large else b""
        end = self.position + 30 + len(entry.name) + len(extra) + 4
        padding = -end % _ALIGNMENT
        self._header(entry, extra + _PADDING_ID + pack("<H", padding) + b"Z" * padding)

    def _header(self, entry: _Entry, extra: bytes) -> None:
        self.entries.append(entry)
        nbytes = 0 if entry.flags else entry.nbytes
        self.written += pack(
            "<4s5H3I2H", b"PK\3\4", 45 if entry.is_large else 20, entry.flags, 0, 0, _DATE, entry.crc, nbytes, nbytes,
            len(entry.name), len(extra),
        )  # fmt: skip
        self.written += entry.name + extra


def _described(entry: _Entry) -> bytes:
    """Return what follows an entry's data, if its header does not describe them."""
    if not entry.flags:
        return b""
    return pack("<4sI" + ("QQ" if entry.is_large else "II"), b"PK\7\b", entry.crc, entry.nbytes, entry.nbytes)


def _directory(entries: Sequence[_Entry], begin: int) -> bytes:
    """Return the directory of a zip file, which begins at `begin`, and what is after it."""
    directory = b"".join(entry.directory for entry in entries)
    ending, count = directory, len(entries)
    if begin >= _MAX32 or count >= _MAX16:
        end = begin + len(directory)
        ending += pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), begin)
        ending += pack("<4sIQI", b"PK\6\7", 0, end, 1)
    few = min(count, _MAX16)
    return ending + pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, len(directory), min(begin, _MAX32), 0)


_BATCH = 1000  # of items that an unpickler has on its stack at a time


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant of a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a callable returns for these arguments."""

    function: Name
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object made without `__init__`, and its state: its attributes, or what `__setstate__` gets."""

    kind: Name
    state: object = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to something outside of the pickle."""

    key: object


def pickled(value: object) -> bytes:
    """Return a pickle of numbers, strings, tuples, lists and dicts, and of the classes above."""
    return b"".join((b"\x80\x02", *_opcodes(value), b"."))


def _opcodes(value: object) -> Iterator[bytes]:
    match value:
        case None:
            yield b"N"
        case bool():
            yield b"\x88" if value else b"\x89"
        case int():
            yield b"J" + pack("<i", value) if -(1 << 31) <= value < 1 << 31 else _long(value)
        case float():
            yield b"G" + pack(">d", value)
        case str():
            text = value.encode()
            yield b"X" + pack("<I", len(text)) + text
        case tuple():
            yield b"("
            for item in value:
                yield from _opcodes(item)
            yield b"t"
        case list():
            yield from _items(b"]", b"e", ((item,) for item in value))
        case Mapping():
            yield from _items(b"}", b"u", iter(value.items()))
        case Name(module, name):
            yield f"c{module}\n{name}\n".encode()
        case Call(function, arguments):
            yield from _opcodes(function)
            yield from _opcodes(arguments)
            yield b"R"
        case Instance(kind, state):
            yield from _opcodes(kind)
            yield b")\x81"
            if state is not None:
                yield from _opcodes(state)
                yield b"b"
        case Persistent(key):
            yield from _opcodes(key)
            yield b"Q"
        case _:
            raise AssertionError(f"no opcodes for a {type(value).__name__}")


def _long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


def _items(empty: bytes, add: bytes, items: Iterator[tuple[object, ...]]) -> Iterator[bytes]:
    yield empty
    while batch := tuple(islice(items, _BATCH)):
        yield b"("
        for part in chain.from_iterable(batch):
            yield from _opcodes(part)
        yield add
