"""Tensors by name, in columns: about 110 bytes for each beside its name, where an object takes 240."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

from manifests.slices import Slice
from stores.base import InputFile
from stores.bundles import TensorAt

_DIGEST_NBYTES = 32
_Kind = tuple[InputFile, str, tuple[int, ...], int, Slice | None, bool]


class TensorMap(MutableMapping[str, TensorAt]):
    """Make a tensor's object when it is asked for: two checkpoints of a million tensors can be compared in memory."""

    __slots__ = ("_begins", "_digests", "_file", "_kinds", "_rows", "_shared")

    def __init__(self) -> None:
        self._rows: dict[str, int | TensorAt] = {}
        self._kinds: list[_Kind] = []  # tensors of one kind share the object
        self._begins, self._digests = array("Q"), bytearray()
        self._file: InputFile | None = None  # that `_shared` is of
        self._shared: dict[_Kind, _Kind] = {}

    def __setitem__(self, name: str, tensor: TensorAt) -> None:
        if tensor.file is not self._file:
            self._file, self._shared = tensor.file, {}
        kind = (tensor.file, tensor.dtype, tensor.shape, tensor.nbytes, tensor.part, tensor.blake3 is not None)
        self._rows[name] = len(self._kinds)
        self._kinds.append(self._shared.setdefault(kind, kind) if tensor.part is None else kind)
        self._begins.append(tensor.begin)
        if tensor.blake3 is not None:  # those before it may have none
            self._digests += bytes((len(self._kinds) - 1) * _DIGEST_NBYTES - len(self._digests)) + tensor.blake3

    def __getitem__(self, name: str) -> TensorAt:
        row = self._rows[name]
        if isinstance(row, TensorAt):
            return row
        file, dtype, shape, nbytes, part, has_digest = self._kinds[row]
        first = row * _DIGEST_NBYTES
        digest = bytes(self._digests[first : first + _DIGEST_NBYTES]) if has_digest else None
        return TensorAt(name, dtype, shape, file, self._begins[row], nbytes, digest, part)

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def renamed(self, names: Iterable[tuple[str, str]]) -> TensorMap:
        """Return the tensors under other names, as pairs of the new and the present one; the columns are shared."""
        other = TensorMap()
        other._rows = {new: self._rows[name] for new, name in names}
        other._kinds, other._begins, other._digests = self._kinds, self._begins, self._digests
        return other

    def objects(self) -> Mapping[str, TensorAt]:
        """Return every tensor as an object, which the map keeps from now on in place of its columns."""
        for name in self._rows:
            self._rows[name] = self[name]
        self._kinds, self._begins, self._digests = [], array("Q"), bytearray()
        return self


def as_objects(tensors: Mapping[str, TensorAt]) -> Mapping[str, TensorAt]:
    """Return tensors of which a plan refers to each, so that none is made twice."""
    return tensors.objects() if isinstance(tensors, TensorMap) else tensors
