"""The tensors of a shard in columns: 24 bytes for each and its name, where an object of each would take 180."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

TensorKind = tuple[str, tuple[int, ...], int]  # dtype, shape, bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a shard. `begin` and `end` are byte offsets in the data area."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class TensorTable(Sequence[TensorEntry]):
    """A shard's tensors, in header order. An entry is made when it is asked for."""

    __slots__ = ("_begins", "_kinds", "_names", "end", "is_adjacent", "is_ordered")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._kinds: list[TensorKind] = []  # tensors of one kind share the object
        self._begins = array("Q")
        self.end = 0  # of the tensor that reaches furthest
        self.is_ordered = True  # whether no tensor begins before the end of the one before it
        self.is_adjacent = True  # whether each begins there, and the first at 0

    def append(self, name: str, kind: TensorKind, begin: int) -> None:
        self._names.append(name)
        self._kinds.append(kind)
        self._begins.append(begin)
        if begin != self.end:
            self.is_adjacent = False
            self.is_ordered = self.is_ordered and begin > self.end
        self.end = max(self.end, begin + kind[2])

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def rows(self) -> Iterator[tuple[int, str, TensorKind, int]]:
        """Yield each tensor by its offset: its number in the header, name, kind and offset."""
        names, kinds, begins = self._names, self._kinds, self._begins
        if self.is_ordered:
            yield from zip(range(len(names)), names, kinds, begins, strict=True)
            return
        for number in sorted(range(len(names)), key=lambda number: (begins[number], begins[number] + kinds[number][2])):
            yield number, names[number], kinds[number], begins[number]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[TensorEntry]:
        for name, (dtype, shape, nbytes), begin in zip(self._names, self._kinds, self._begins, strict=True):
            yield TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=begin + nbytes)

    @overload
    def __getitem__(self, index: int) -> TensorEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorEntry]: ...
    def __getitem__(self, index: int | slice) -> TensorEntry | Sequence[TensorEntry]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        dtype, shape, nbytes = self._kinds[index]
        begin = self._begins[index]
        return TensorEntry(name=self._names[index], dtype=dtype, shape=shape, begin=begin, end=begin + nbytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple, which has another hash
