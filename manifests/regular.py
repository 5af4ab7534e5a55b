"""Open regular files only: opening a pipe without a writer blocks forever, and devices have no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from manifests.errors import StoreError

_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; usable as the `opener` of `open`.

    Raises:
        StoreError: it is a pipe, a socket or a device.
        OSError: it cannot be opened, or is a folder.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # of a socket, or of a disk that was removed
            _check(os.stat(path), path)
        raise
    try:
        _check(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(found: os.stat_result, path: str | Path) -> None:
    if (kind := _KINDS.get(stat.S_IFMT(found.st_mode))) is not None:
        problem = f"expected a regular file, found {kind}"
        raise StoreError(str(path), problem, "replace it with a regular file", code="store.not-a-file")
