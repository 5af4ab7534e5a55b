"""Paths inside a checkpoint folder: relative, below it, valid on every system."""

from __future__ import annotations

from manifests.schema import WEIGHTS, Holds

__all__ = ["is_unicode", "problem_with_path", "shard_path"]

_MAX_CHARS = 1024
_MAX_PART_NBYTES = 240  # file systems allow 255; files are first written as `.NAME.partial`


def shard_path(stage: int, holds: Holds = WEIGHTS, *, number: int = 0, of: int = 1) -> str:
    """Return the path of a stage's shard of weights or optimizer state: the only one, or `number` (from 0) of `of`.

    Optimizer state is in separate folders: other tools read all shards of a folder as one set of tensors.
    """
    name = "model.safetensors" if of == 1 else f"model-{number + 1:05d}-of-{of:05d}.safetensors"
    return "/".join((f"stage-{stage:03d}", *(() if holds == WEIGHTS else (holds,)), name))


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
