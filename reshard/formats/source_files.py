"""Files that describe the files of a source: wrong beside a packed model, and right beside an export of equal bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from manifests.invariants import SOURCE_FILES
from reshard.tensors.checkpoint import AuxiliaryAt

# Digests and signatures.
_DESCRIBING = (
    "digests.json", ".sha1", ".sha256", ".sha512", ".md5", ".blake3", ".b3", ".sig", ".asc", ".sigstore",
    ".sigstore.json",
)  # fmt: skip
_SUMS = re.compile(r"(md5|sha\d+|b2|b3|blake2|blake3)sums?(\.txt)?|checksums?(\.\w+)?")


def describes_files(name: str) -> bool:
    """Whether a file has digests, signatures or names of the files beside it: wrong where the weights are elsewhere."""
    base = name.rpartition("/")[2].lower()
    return base.endswith(_DESCRIBING) or bool(_SUMS.fullmatch(base))


def with_source_files(files: Sequence[AuxiliaryAt], *, is_same: bool) -> list[AuxiliaryAt]:
    """Return auxiliary files with those that describe the source's files in their places; without, unless `is_same`."""
    others = [item for item in files if not item.path.startswith(SOURCE_FILES)]
    paths = {item.path for item in others}
    names = [(item, item.path.removeprefix(SOURCE_FILES)) for item in files if item.path.startswith(SOURCE_FILES)]
    described = [replace(item, path=name) for item, name in names if describes_files(name) and name not in paths]
    return [*others, *(described if is_same else ())]
