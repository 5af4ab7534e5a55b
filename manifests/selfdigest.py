"""The digest that manifest.json contains of itself, at the end of `created_by`.

# Note [A manifest's own digest]
Readers of version 1 refuse unknown fields, but accept any text in `created_by`, so the digest is there. It is the
BLAKE3 of the whole file with the digest's own 64 digits replaced by zeros (docs/adr/0019). A manifest without a digest
comes from an older writer, or somebody removed the digest to keep an edit: it is accepted.
"""

from __future__ import annotations

import re

from manifests.digest import PREFIX, digest_bytes
from manifests.errors import ManifestError

_MARK = ", manifest "
BLANK = PREFIX + 64 * "0"
_MARKED = re.compile(rf"(?P<by>.*){_MARK}(?P<digest>{PREFIX}[0-9a-f]{{64}})", re.DOTALL)
_LIKE_MARKED = re.compile(rf"{_MARK}{PREFIX}|[0-9a-f]{{64}}\Z")  # a damaged mark


def mark(created_by: str, digest: str) -> str:
    """Return the value of `created_by` with the digest of the document appended."""
    return f"{created_by}{_MARK}{digest}"


def split_mark(created_by: str) -> tuple[str, str | None]:
    """Split `created_by` into the program and the digest; None if it has no digest.

    Raises:
        ManifestError: the digest is malformed.
    """
    if found := _MARKED.fullmatch(created_by):
        return found["by"], found["digest"]
    if _LIKE_MARKED.search(created_by):
        raise ManifestError(
            "created_by",
            "malformed digest: expected `, manifest blake3:` and 64 hex digits at the end",
            _HINT,
            code="manifest.digest-mismatch",
        )
    return created_by, None


def own_digest(text: bytes, digest: str = BLANK) -> str:
    """Return the digest of a manifest's text, with `digest` replaced by zeros in it."""
    return digest_bytes(text.replace(digest.encode(), BLANK.encode()))


def check_own_digest(text: bytes, digest: str | None, where: str) -> None:
    """Check a manifest's text against the digest in it, if it has one.

    Raises:
        ManifestError: the text was changed after it was written.
    """
    if digest is not None and (found := own_digest(text, digest)) != digest:
        raise ManifestError(
            where,
            f"changed after it was written: expected {digest} (created_by), found {found}",
            _HINT,
            code="manifest.digest-mismatch",
        )


_HINT = (
    "restore manifest.json from a good copy, or write the checkpoint again; to keep an intended edit, remove "
    "`, manifest blake3:...` from created_by, which disables this check"
)
