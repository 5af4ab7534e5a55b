"""The digest that manifest.json carries of itself, as the last words of `created_by`.

# Note [A manifest's own digest]
Readers of version 1 refuse fields that they do not know, and take any text in `created_by`: so the digest is there.
It is the BLAKE3 of the whole file with the digest's own 64 digits replaced by zeros (docs/adr/0019). A text without one
was written by an older writer, or somebody took it out to keep an edit: it is read.
"""

from __future__ import annotations

import re

from manifests.digest import PREFIX, digest_bytes
from manifests.errors import ManifestError

__all__ = ["BLANK", "check_own_digest", "mark", "own_digest", "split_mark"]

_MARK = ", manifest "
BLANK = PREFIX + 64 * "0"
_MARKED = re.compile(rf"(?P<by>.*){_MARK}(?P<digest>{PREFIX}[0-9a-f]{{64}})", re.DOTALL)
_LIKE_MARKED = re.compile(rf"{_MARK}{PREFIX}|[0-9a-f]{{64}}\Z")  # a mark with a character changed


def mark(created_by: str, digest: str) -> str:
    """Return the text of the field `created_by` that carries the digest of its own document."""
    return f"{created_by}{_MARK}{digest}"


def split_mark(created_by: str) -> tuple[str, str | None]:
    """Return who wrote a manifest, and the digest that its field `created_by` carries; None if it has none.

    Raises:
        InputError: it has something like one, which no writer writes.
    """
    if found := _MARKED.fullmatch(created_by):
        return found["by"], found["digest"]
    if _LIKE_MARKED.search(created_by):
        raise ManifestError(
            "created_by",
            "expected to end in `, manifest blake3:` and 64 hex digits, or to have no such digest",
            _HINT,
            code="manifest.digest-mismatch",
        )
    return created_by, None


def own_digest(text: bytes, digest: str = BLANK) -> str:
    """Return the digest of a manifest's text, in which `digest` is a placeholder for what is returned."""
    return digest_bytes(text.replace(digest.encode(), BLANK.encode()))


def check_own_digest(text: bytes, digest: str | None, where: str) -> None:
    """Raise unless a manifest's text is what the digest in it was taken of; without one there is nothing to check.

    Raises:
        InputError: the text was changed after it was written.
    """
    if digest is not None and (found := own_digest(text, digest)) != digest:
        raise ManifestError(
            where,
            f"was changed after it was written: expected {digest} (created_by), found {found}",
            _HINT,
            code="manifest.digest-mismatch",
        )


_HINT = (
    "copy manifest.json again from where it is whole, or write the folder again; to keep an edit of your own, remove "
    "the words `, manifest blake3:...` from created_by, and nothing checks the file any more"
)
