"""Paths inside a checkpoint folder: relative, below it, valid on every system, and of regular files.

Opening a pipe without a writer blocks forever, and devices have no end: `open_regular` refuses both. Whether there is a
file that this package depends on is asked with `is_file`: a disk that fails is not taken for one without it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from manifests.errors import StoreError
from manifests.schema import WEIGHTS, Holds

_MAX_CHARS = 1024
_MAX_PART_NBYTES = 240  # file systems allow 255; files are first written as `.NAME.partial`
_STAGE_FOLDER = re.compile(r"stage-[0-9]{3,}")


def root_shard_path(number: int, of: int) -> str:
    """Return the path of shard `number` (from 0) of the `of` shards of whole weights of all stages.

    They are in the root, named as transformers names them: see `manifests.index`.
    """
    return f"model-{number + 1:05d}-of-{of:05d}.safetensors"


def shard_path(stage: int, holds: Holds = WEIGHTS, *, number: int = 0, of: int = 1) -> str:
    """Return the path of a shard in its stage's folder: the only one of its kind, or `number` (from 0) of `of`.

    Other tools read all shards of the root as one set of tensors. So this is the place of optimizer state, of slices,
    and of weights beside virtual bundles; each kind has a folder of its own.
    """
    name = "model.safetensors" if of == 1 else root_shard_path(number, of)
    return "/".join((f"stage-{stage:03d}", *(() if holds == WEIGHTS else (holds,)), name))


def replicas_path(stage: int) -> str:
    """Return the path of a stage's shard of tied replicas, if their owners and all other weights are in the root."""
    return f"stage-{stage:03d}/tied/model.safetensors"


def is_in_stage_folder(path: str) -> bool:
    """Return whether a shard is in the folder of one stage, where readers of Hugging Face folders do not look."""
    return any(_STAGE_FOLDER.fullmatch(part) for part in path.split("/")[:-1])


def is_unicode(text: str) -> bool:
    """Return whether text can be encoded: a file name that is not valid UTF-8 has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def problem_with_path(path: str) -> str | None:
    """Return why a path is not allowed in a checkpoint's folder; None if it is."""
    if not path or len(path) > _MAX_CHARS:
        return f"expected a path of 1 to {_MAX_CHARS} characters, found {len(path)}"
    if path.startswith("/") or "\\" in path or any(ord(char) < 32 or ord(char) == 127 for char in path):
        return "expected a relative path with / as separator and no control characters"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "expected a path below its folder, without empty, . or .. parts"
    if not is_unicode(path):
        return "expected a path in valid Unicode"
    if max(len(part.encode()) for part in path.split("/")) > _MAX_PART_NBYTES:
        return f"expected path parts of at most {_MAX_PART_NBYTES} bytes"
    return None


_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def status_of(path: Path, *, follows_links: bool = True) -> os.stat_result | None:
    """Return the status of a file or folder; None if there is none.

    A disk that fails raises OSError: from Python 3.14 on, `exists`, `is_file` and `is_dir` of a path return False then.
    """
    try:
        return os.stat(path, follow_symlinks=follows_links)
    except ValueError:  # no file can have such a name
        return None
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def is_file(path: Path) -> bool:
    """Return whether there is a regular file; see `status_of`."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder; see `status_of`."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; usable as the `opener` of `open`."""
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


def _check(status: os.stat_result, path: str | Path) -> None:
    if (kind := _KINDS.get(stat.S_IFMT(status.st_mode))) is not None:
        problem = f"expected a regular file, found {kind}"
        raise StoreError(str(path), problem, "replace it with a regular file", code="store.not-a-file")
