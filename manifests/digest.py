"""BLAKE3 digests, written `blake3:<64 hex digits>`."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

__all__ = ["PREFIX", "Hasher", "digest_bytes", "digest_hex", "is_digest"]

PREFIX = "blake3:"
_HEX = frozenset("0123456789abcdef")

Hasher = blake3


def digest_hex(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the hex digest of the concatenated pieces, without the prefix."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def digest_bytes(data: bytes | memoryview) -> str:
    return PREFIX + digest_hex((data,))


def is_digest(text: str) -> bool:
    digits = text.removeprefix(PREFIX)
    return text.startswith(PREFIX) and len(digits) == 64 and set(digits) <= _HEX
