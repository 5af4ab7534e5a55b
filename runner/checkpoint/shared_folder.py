"""Whether this node sees what another one has made: a folder that nodes share shows it, if late. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from manifests.errors import CheckpointError, InputError, refused_by_system
from manifests.schema import Shard

__all__ = ["check_folder", "check_shards"]

_PAUSES_S = (0.1, 0.3, 1.0, 3.0)
_HINT = "--checkpoint and --save must be in a folder that all nodes share"
_ABSENT = (FileNotFoundError, NotADirectoryError)


def check_folder(folder: Path) -> None:
    """Make sure that a folder which rank 0 has made is here.

    Raises:
        InputError: it is not, after some seconds.
    """

    def find_error() -> InputError | None:
        if _nbytes_of(folder) is not None:
            return None
        return CheckpointError(
            str(folder), "rank 0 made this folder, and it is not here", _HINT, code="checkpoint.not-shared"
        )

    _bear(find_error)


def check_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Make sure that the shards which ranks say they wrote below a folder are here; none of them is read.

    Raises:
        InputError: one of them is not, or is of another size, after some seconds.
    """
    _bear(lambda: _first_wrong(folder, shards))


def _bear(find_error: Callable[[], InputError | None]) -> None:
    """Look a few times: NFS may answer a while out of what a node remembers."""
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
            os.listdir(parent)  # NFS asks its server about a folder that is opened
    for shard in shards:
        path = folder / shard.path
        found = _nbytes_of(path)
        if found is None:
            return CheckpointError(
                str(path), "another rank wrote this shard, and it is not here", _HINT, code="checkpoint.not-shared"
            )
        if found != shard.nbytes:
            return CheckpointError(
                str(path),
                f"a rank wrote {shard.nbytes} bytes here, and {found} are here",
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
