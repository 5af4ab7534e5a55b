"""BLAKE3 digests, written `blake3:<64 hex digits>`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from blake3 import blake3

PREFIX = "blake3:"
_HEX = frozenset("0123456789abcdef")
_NBYTES = 32
_SPACED = re.compile(r"(?:[0-9a-f]{64}(?: (?!\Z)|\Z))*+")

Hasher = blake3


def digest_hex(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the hex digest of the concatenated pieces, without the prefix."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def digest_bytes(data: bytes | memoryview) -> str:
    return digest_pieces((data,))


def digest_pieces(pieces: Iterable[bytes | memoryview]) -> str:
    return PREFIX + digest_hex(pieces)


def is_digest(text: str) -> bool:
    return text.startswith(PREFIX) and is_hex_digest(text.removeprefix(PREFIX))


def is_hex_digest(text: str) -> bool:
    """Return whether a text is a digest without the prefix."""
    return len(text) == 2 * _NBYTES and _HEX.issuperset(text)


class DigestTable(Sequence[str]):
    """Hex digests of many tensors, without the prefix, in 32 bytes each: as strings they would take 113."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes | bytearray) -> None:
        self._raw = raw if isinstance(raw, bytearray) else bytearray(raw)

    @classmethod
    def blank(cls, num_digests: int) -> DigestTable:
        """Return a table of digests that are not known yet."""
        return cls(bytes(num_digests * _NBYTES))

    @classmethod
    def of(cls, digests: Iterable[str]) -> DigestTable:
        raw = bytearray()
        for digits in digests:
            raw += bytes.fromhex(digits)
        return cls(raw)

    @classmethod
    def read(cls, text: str) -> DigestTable | None:
        """Return the digests of a text that separates them by spaces; None if it is not of this form."""
        if _SPACED.fullmatch(text) is None:
            return None
        return cls(bytearray.fromhex(text))

    def raw(self, index: int) -> bytes:
        return bytes(self._raw[index * _NBYTES : (index + 1) * _NBYTES])

    def put(self, first: int, raw: bytes | bytearray) -> None:
        """Set consecutive digests, given as bytes, from number `first` on."""
        begin = first * _NBYTES
        assert begin + len(raw) <= len(self._raw), "beyond the table"
        self._raw[begin : begin + len(raw)] = raw

    def __len__(self) -> int:
        return len(self._raw) // _NBYTES

    def __iter__(self) -> Iterator[str]:
        for begin in range(0, len(self._raw), _NBYTES):
            yield self._raw[begin : begin + _NBYTES].hex()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> DigestTable: ...
    def __getitem__(self, index: int | slice) -> str | DigestTable:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._raw[numbers * _NBYTES : (numbers + 1) * _NBYTES].hex()
        assert numbers.step == 1, "consecutive digests only"
        return DigestTable(self._raw[numbers.start * _NBYTES : numbers.stop * _NBYTES])
