"""The tensors of a file that torch.save wrote: names, dtypes, shapes, and where their bytes are.

Source: torch 2.13.0, torch/_utils.py, torch/storage.py, torch/serialization.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

from manifests.errors import SourceError
from manifests.safetensors import DTYPE_BITS, MAX_DIM, MAX_RANK
from reshard.archives.pickled import BadPickleError, Record, Reference, check_repeats, read_pickle
from reshard.archives.zipped import Archive, ZipEntry, archives_in, bad_archive, read_entries, read_entry
from reshard.tensors.checksums import RecordedFile, with_records
from reshard.tensors.lazy import STEP_NBYTES, Buffer, derive, read_blocks
from stores.base import InputFile, Range, read_range
from stores.bundles import TensorAt

_MAX_PICKLE_NBYTES = 256 << 20
_PICKLE, _BYTE_ORDER, _STORAGES = "data.pkl", "byteorder", "data/"
_ZIP_MAGIC = b"PK\x03\x04"
_OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_SAVE_AGAIN = "load it with torch.load(FILE, weights_only=True) and save it again with torch.save"
# Of dtypes, and of the storage classes that stand for them in older pickles.
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
STORAGE_CLASSES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64",
}  # fmt: skip


T = TypeVar("T")


class ArchiveDtype(NamedTuple):  # a pickle can set the attributes of other objects
    """A dtype, or the class of storages of it; `None` of storages of bytes."""

    name: str | None


class _View(NamedTuple):
    """What a pickle says of a tensor: a storage, and which of its elements the tensor has.

    `bits` are those that change the elements when they are read: `neg` and `conj`.
    """

    storage: Reference
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: ArchiveDtype | None = None
    bits: tuple[str, ...] = ()


class _Dict(dict[Any, Any]):
    """An OrderedDict, without the `_metadata` of state dicts: versions of modules, which transformers does not use."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict) or state.keys() - {"_metadata"}:
            raise BadPickleError(f"a dict with attributes: {str(state)[:80]}")


def _size(counts: object) -> tuple[object, ...]:
    if not isinstance(counts, tuple):
        raise BadPickleError("a torch.Size of other things than counts")
    return counts


def _view(storage: Reference, offset: int, shape: Any, strides: Any, requires_grad: object, hooks: object,
          metadata: object = None) -> _View:  # fmt: skip
    _check_flags(requires_grad, hooks)
    return _View(storage, offset, shape, strides, bits=_bits(metadata))


def _view_of_bytes(storage: Reference, offset: int, shape: Any, strides: Any, requires_grad: object, hooks: object,
                   dtype: ArchiveDtype, metadata: object = None) -> _View:  # fmt: skip
    _check_flags(requires_grad, hooks)
    return _View(storage, offset, shape, strides, dtype, _bits(metadata))


def _parameter(data: object, requires_grad: object, hooks: object) -> _View:
    _check_flags(requires_grad, hooks)
    return _as_view(data, "a parameter")


def _check_flags(requires_grad: object, hooks: object) -> None:
    """Refuse what torch.save never writes. Which parameters are trained is an option of a run."""
    if type(requires_grad) is not bool or not isinstance(hooks, dict) or hooks:
        raise BadPickleError("a tensor with hooks, or whose requires_grad is not a bool")


def _bits(metadata: object) -> tuple[str, ...]:
    """Return the bits that are set, now: a pickle may change what it has passed."""
    if metadata is not None and (not isinstance(metadata, dict) or not all(type(name) is str for name in metadata)):
        raise BadPickleError("a tensor with metadata that are not a dict")
    return tuple(name for name, value in (metadata or {}).items() if value is not False)


VALUES: Mapping[str, object] = {
    "collections.OrderedDict": _Dict,
    "torch.Size": _size,
    **{f"torch.{name}": ArchiveDtype(dtype) for name, dtype in DTYPES.items()},
}
_KNOWN: Mapping[str, object] = {
    **VALUES,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view_of_bytes,
    "torch._utils._rebuild_parameter": _parameter,
    # Constants, which a pickle names and does not call.
    **{f"torch.{name}Storage": ArchiveDtype(dtype) for name, dtype in STORAGE_CLASSES.items()},
    "torch.storage.UntypedStorage": ArchiveDtype(None),
}


def read_archive(file: InputFile) -> list[TensorAt]:
    """Return the tensors of a state dict that torch.save wrote, in its order.

    Tensors that share a storage have overlapping bytes. One that is not contiguous is gathered when it is read.
    """
    recorded = with_records(file)
    return _read(
        recorded,
        (0, file.nbytes),
        lambda value, entries: [_tensor(recorded, name, view, entries) for name, view in _items(value)],
    )


def read_tensor(archive: Archive, name: str) -> TensorAt:
    """Return the one tensor that torch.save wrote, under this name."""
    file = archive.file
    return _read_from(archive, lambda value, entries: _tensor(file, name, _as_view(value, name), entries))


def read_value(file: InputFile, part: Range) -> object:
    """Return the number, string or container of them that torch.save wrote to a part of a file."""

    def checked(value: object, entries: Mapping[str, ZipEntry]) -> object:
        check_repeats(value)
        return value

    return _read(with_records(file), part, checked)


def read_object(file: InputFile, name: str, part: Range | None = None) -> object:
    """Return what torch.save wrote to a file or a part of it: a tensor, a dict of tensors and other values, or a value.

    Tensors at the top, under `name`, or in a dict there are where their bytes are. Objects of other classes are their
    fields.
    """

    def find(value: object, entries: Mapping[str, ZipEntry]) -> object:
        check_repeats(value)
        if isinstance(value, _View):
            return _tensor(recorded, name, value, entries)
        if not isinstance(value, dict):
            return value
        views = {key: item for key, item in value.items() if isinstance(item, _View)}
        return {**value, **{key: _tensor(recorded, str(key), view, entries) for key, view in views.items()}}

    recorded = with_records(file)
    return _read(recorded, part or (0, file.nbytes), find, Record)


def _read(
    file: RecordedFile,
    part: Range,
    tensors_of: Callable[[object, Mapping[str, ZipEntry]], T],
    unknown: type[Record] | None = None,
) -> T:
    """Return what `tensors_of` finds in the value that was saved and the entries of the file."""
    (archive,) = archives_in(file, [part])
    return _read_from(archive, tensors_of, unknown)


def _read_from(
    archive: Archive, tensors_of: Callable[[object, Mapping[str, ZipEntry]], T], unknown: type[Record] | None = None
) -> T:
    file = archive.file
    _check_magic(archive)
    entries = read_entries(archive)
    if _PICKLE not in entries:
        raise bad_archive(file, f"expected a file that torch.save wrote, found no entry {_PICKLE!r}")
    if _BYTE_ORDER in entries and (order := read_entry(archive, entries[_BYTE_ORDER], 16)) != b"little":
        raise bad_archive(file, f"expected little-endian bytes, found {order.decode(errors='replace')!r}")
    try:
        raw = read_entry(archive, entries[_PICKLE], _MAX_PICKLE_NBYTES)
        for entry in entries.values():
            if entry.crc is not None and entry.name.startswith(_STORAGES):
                file.add(entry.name, entry.begin, entry.end, entry.crc)
        value = read_pickle(raw, _KNOWN, unknown)
        return tensors_of(value, entries)
    except BadPickleError as error:
        problem = f"expected tensors: {error}"
        raise SourceError(str(file), problem, _SAVE_AGAIN, code="source.bad-pickle") from error


def _check_magic(archive: Archive) -> None:
    file, begin = archive.file, archive.begin
    first = archive.read_range(begin, min(archive.end, begin + len(_OLD_MAGIC)))
    if first.startswith(_ZIP_MAGIC):
        return
    if first == _OLD_MAGIC:
        problem = "expected a zip file, found the format that torch.save wrote before torch 1.6"
        raise SourceError(str(file), problem, _SAVE_AGAIN, code="source.old-archive")
    raise bad_archive(file, f"expected a zip file as torch.save writes it, found bytes {first[:4].hex()!r}")


def _items(state: object) -> list[tuple[str, _View]]:
    if not isinstance(state, dict):
        raise BadPickleError(f"found {_kind(state)} in place of a state dict")
    return [(_as_name(name), _as_view(value, name)) for name, value in state.items()]


def _as_name(name: object) -> str:
    if not isinstance(name, str):
        raise BadPickleError(f"found {_kind(name)} as a name")
    return name


def _as_view(value: object, name: object) -> _View:
    if not isinstance(value, _View):
        raise BadPickleError(f"found {_kind(value)} under {str(name)[:80]!r}")
    return value


def _kind(value: object) -> str:
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__.strip('_').lower()}"


def _tensor(file: InputFile, name: str, view: _View, entries: Mapping[str, ZipEntry]) -> TensorAt:
    if view.bits:
        problem = f"is stored with torch's bits {', '.join(view.bits)[:80]}, which change its values when they are read"
        hint = "save its .resolve_conj().resolve_neg() instead"
        raise SourceError(f"{file}: {name!r}", problem, hint, code="source.unresolved-tensor")
    dtype, entry = _storage(view, name, entries)
    are_short = all(isinstance(dims, tuple) and len(dims) <= MAX_RANK for dims in (view.shape, view.strides))
    counts = (view.offset, *view.shape, *view.strides) if are_short else ()
    if not counts or not all(type(count) is int and 0 <= count < MAX_DIM for count in counts):
        raise BadPickleError(f"{name[:80]!r} has a shape, strides or an offset that are not counts")
    if len(view.strides) != len(view.shape):
        raise BadPickleError(f"{name[:80]!r} has {len(view.strides)} strides for {len(view.shape)} dimensions")
    width = DTYPE_BITS[dtype] // 8
    is_empty = 0 in view.shape
    spanned = 0 if is_empty else 1 + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
    if (view.offset + spanned) * width > entry.nbytes or prod(filter(None, view.shape)) * width >= MAX_DIM:
        raise BadPickleError(f"{name[:80]!r} reaches beyond its storage of {entry.nbytes} bytes")
    tensor = TensorAt(
        name, dtype, view.shape, file, entry.begin + view.offset * width, prod(view.shape) * width, None, None
    )  # fmt: skip
    if is_empty or is_contiguous(view.shape, view.strides):
        return tensor
    return gathered(tensor, view.strides, spanned)


def _storage(view: _View, name: str, entries: Mapping[str, ZipEntry]) -> tuple[str, ZipEntry]:
    key = view.storage.key if isinstance(view.storage, Reference) else None
    match key:
        case ("storage", ArchiveDtype(stored), str(number), str(), int(count)):  # wherever it was
            dtype = stored or (view.dtype.name if isinstance(view.dtype, ArchiveDtype) else None)
        case _:
            raise BadPickleError(f"{name[:80]!r} has no storage")
    if dtype is None:
        raise BadPickleError(f"{name[:80]!r} has no dtype")
    nbytes = count * (DTYPE_BITS[stored] // 8 if stored else 1)
    entry = entries.get(f"{_STORAGES}{number}")
    if entry is None:
        raise BadPickleError(f"the storage of {name[:80]!r}, {number[:80]!r}, is not in the file")
    if entry.nbytes != nbytes:
        raise BadPickleError(f"the storage of {name[:80]!r} is of {nbytes} bytes, its record of {entry.nbytes}")
    return dtype, entry


_MAX_NBYTES = 1 << 30  # of the storage, which is read whole, and of the tensor
_FORMATS: Mapping[int, Literal["B", "H", "I", "Q"]] = {
    1: "B",
    2: "H",
    4: "I",
    8: "Q",
}  # of memoryviews, by bytes of an element


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor's elements are adjacent and in order; strides of axes of size 1 mean nothing."""
    pairs = zip(shape, strides, (prod(shape[axis + 1 :]) for axis in range(len(shape))), strict=True)
    return all(size == 1 or step == expected for size, step, expected in pairs)


def gathered(tensor: TensorAt, strides: tuple[int, ...], num_spanned: int) -> TensorAt:
    """Return a tensor whose first element is at `tensor.begin`, and whose others follow at `strides`, in elements.

    Its `num_spanned` elements of storage are in memory while it is read.
    """
    width = DTYPE_BITS[tensor.dtype] // 8
    span = TensorAt(
        tensor.name, tensor.dtype, (num_spanned,), tensor.file, tensor.begin, num_spanned * width, None, None
    )
    nbytes = max(span.nbytes, tensor.nbytes)
    if nbytes > _MAX_NBYTES:
        raise SourceError(
            tensor.place,
            f"is not contiguous: expected at most {_MAX_NBYTES} bytes, found {nbytes}",
            "save its .contiguous() instead",
            code="source.large-strided-tensor",
        )
    make = partial(_gather, span, tensor.shape, strides, width)
    return derive(tensor, tensor.dtype, "made contiguous", (span,), make)


def swapped(tensor: TensorAt) -> TensorAt:
    """Return a tensor of three axes with the last two swapped. One index of the first is in memory at a time."""
    *outer, rows, columns = tensor.shape
    new = replace(tensor, shape=(*outer, columns, rows))
    return derive(new, tensor.dtype, "with its last two axes swapped", (tensor,), partial(_swap, tensor))


def _swap(tensor: TensorAt) -> Iterator[Buffer]:
    count, _, columns = tensor.shape
    for matrix in read_blocks(tensor, max(1, tensor.nbytes // max(1, count))):
        elements = matrix.cast(_FORMATS[DTYPE_BITS[tensor.dtype] // 8])
        yield b"".join(elements[column::columns].tobytes() for column in range(columns))


def _gather(span: TensorAt, shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> Iterator[Buffer]:
    """Yield the elements in the tensor's order, a few rows along the last axis at a time."""
    elements = memoryview(read_range(span.file, span.begin, span.end)).cast(_FORMATS[width])
    *outer, count = shape
    *steps, step = strides
    block = bytearray()
    for index in product(*map(range, outer)):
        begin = sum(at * stride for at, stride in zip(index, steps, strict=True))
        if step:
            block += elements[begin : begin + (count - 1) * step + 1 : step].tobytes()
        else:
            block += elements[begin : begin + 1].tobytes() * count
        if len(block) >= STEP_NBYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)
