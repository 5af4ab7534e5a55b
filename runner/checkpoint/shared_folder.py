"""Check that this node sees what another one has written: a shared folder shows it, maybe late. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from manifests.errors import CheckpointError, InputError, refused_by_system
from manifests.schema import Shard

_PAUSES_S = (0.1, 0.3, 1.0, 3.0)
_HINT = "--checkpoint and --save must be in a folder that all nodes share"
_ABSENT = (FileNotFoundError, NotADirectoryError)


def check_folder(folder: Path) -> None:
    """Check that a folder which rank 0 has created is visible here.

    Raises:
        CheckpointError: it is not, after some seconds.
    """

    def find_error() -> InputError | None:
        if _nbytes_of(folder) is not None:
            return None
        return CheckpointError(
            str(folder),
            "rank 0 created this folder, and this node does not see it",
            _HINT,
            code="checkpoint.not-shared",
        )

    _retry(find_error)


def check_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Check that the shards which ranks have written in a folder are visible here; none of them is read.

    Raises:
        CheckpointError: one of them is not, or has another size, after some seconds.
    """
    _retry(lambda: _first_wrong(folder, shards))


def _retry(find_error: Callable[[], InputError | None]) -> None:
    """Look a few times: NFS may answer from a node's cache for a while."""
    for pause_s in _PAUSES_S:
        if find_error() is None:
            return
        time.sleep(pause_s)
    if (error := find_error()) is not None:
        raise error


def _first_wrong(folder: Path, shards: Sequence[Shard]) -> InputError | None:
    above = {folder / parent for shard in shards for parent in PurePosixPath(shard.path).parents}
    for parent in sorted(above):
        with suppress(OSError):
            os.listdir(parent)  # opening a folder makes NFS ask its server
    for shard in shards:
        path = folder / shard.path
        found = _nbytes_of(path)
        if found is None:
            return CheckpointError(
                str(path),
                "another rank wrote this shard, and this node does not see it",
                _HINT,
                code="checkpoint.not-shared",
            )
        if found != shard.nbytes:
            return CheckpointError(
                str(path),
                f"expected the {shard.nbytes} bytes that a rank has written, found {found}",
                _HINT,
                code="checkpoint.not-shared",
            )
    return None


def _nbytes_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except _ABSENT:
        return None
    except OSError as error:
        raise refused_by_system(str(path), error, code="checkpoint.unreadable") from error
