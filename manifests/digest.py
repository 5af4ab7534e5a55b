"""BLAKE3 digests, written `blake3:<64 hex digits>`."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

PREFIX = "blake3:"
_HEX = frozenset("0123456789abcdef")
_NBYTES = 32

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


def split_digests(text: str) -> list[str] | None:
    """Return the hex digests of a text that separates them by spaces; None if it is not of this form."""
    digests = text.split(" ") if text else []
    return digests if all(map(is_hex_digest, digests)) else None
