"""The number of documents that a run had skipped when it saved: a small file of the checkpoint, absent for 0.

It is an auxiliary file like config.json, so a checkpoint that is resharded to another pipeline degree keeps it, and
readers that do not know it can read the rest.
"""

from __future__ import annotations

import json

from manifests.digest import digest_bytes
from manifests.errors import CheckpointError
from manifests.jsontext import parse_json_object
from manifests.schema import AuxiliaryFile
from manifests.store import read_small_file
from runner.bundle.packed import Packed

SKIPPED_NAME = "skipped-documents.json"
_FIELD = "num_skipped"


def encode_skipped(num_skipped: int) -> bytes:
    return (json.dumps({"version": 1, _FIELD: num_skipped}) + "\n").encode()


def with_skipped(files: tuple[AuxiliaryFile, ...], num_skipped: int) -> tuple[AuxiliaryFile, ...]:
    """Return a checkpoint's auxiliary files with this count in place of an earlier one."""
    others = tuple(file for file in files if file.path != SKIPPED_NAME)
    if not num_skipped:
        return others
    data = encode_skipped(num_skipped)
    return (*others, AuxiliaryFile(path=SKIPPED_NAME, nbytes=len(data), digest=digest_bytes(data)))


def read_skipped(packed: Packed) -> int:
    """Return the number of documents that a checkpoint's run had skipped.

    Raises:
        InputError: its file is damaged.
    """
    auxiliary = next((file for file in packed.manifest.files if file.path == SKIPPED_NAME), None)
    if auxiliary is None:
        return 0
    path = packed.root / SKIPPED_NAME
    found = parse_json_object(read_small_file(path, auxiliary.digest), str(path)).get(_FIELD)
    if type(found) is not int or found < 0:
        raise CheckpointError(
            f"{path}: {_FIELD}", f"expected a count, found {str(found)[:80]}", code="resume.bad-count"
        )
    return found
