"""Fuzz target: manifest.json. What the decoder takes, it writes, and reads again as the same manifest."""

from __future__ import annotations

from pathlib import Path

from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError
from tests.builders import with_digest

_GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"


def check(text: bytes) -> None:
    """Raise AssertionError unless the text is refused, or decode and encode agree on it."""
    try:
        manifest = decode_manifest(with_digest(text))  # which no mutation gets right
    except InputError:
        return
    written = encode_manifest(manifest)
    again = decode_manifest(written)
    assert again == manifest
    assert encode_manifest(again) == written


def seeds() -> tuple[bytes, ...]:
    """Give the golden manifests: packed, virtual and trained."""
    return tuple(path.read_bytes() for path in sorted(_GOLDEN.glob("manifest-*.json")))
