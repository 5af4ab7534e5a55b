"""Files of a checkpoint folder: read with checks, written so that a kill leaves the old or the new."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.codec import decode_manifest, encode_manifest
from manifests.digest import digest_bytes
from manifests.errors import (
    InputError,
    ManifestError,
    ShardError,
    SourceError,
    refused_by_system,
)
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME, check_manifest
from manifests.jsontext import MAX_CONFIG_NBYTES, parse_config
from manifests.regular import open_regular
from manifests.safetensors import Header, read_header
from manifests.schema import Manifest, Parent, Shard

__all__ = [
    "check_links",
    "check_shard",
    "find_manifest",
    "links_out_of",
    "locate_manifest",
    "no_manifest",
    "open_shard",
    "parent_of",
    "read_config",
    "read_manifest",
    "read_small_file",
    "sync_folder",
    "write_file",
    "write_manifest",
]

_MAX_SMALL_NBYTES = 1 << 30
_UNFINISHED = "a folder without one was never finished; make one with reshard pack SOURCE --layout SPEC --out DIR"
_DAMAGED = "it was changed or removed after it was written: copy the checkpoint again, or write it again"


def find_manifest(path: Path) -> Path:
    """Give the path of manifest.json, from itself or from its folder."""
    return path / MANIFEST_NAME if path.is_dir() else path


def locate_manifest(path: Path) -> Path:
    """Give the path of manifest.json, from itself or from its folder, with links followed to the files beside it."""
    path = find_manifest(path)
    found = path.resolve()
    # The hub's cache keeps the file itself under another name, with no other file of the checkpoint beside it.
    return found if found.name == MANIFEST_NAME else path.parent.resolve() / path.name


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest, named by its file or by its folder.

    Raises:
        InputError: absent, unreadable or wrong (see `decode_manifest`).
    """
    file = find_manifest(path)
    if not file.exists():
        raise no_manifest(str(path), path)
    manifest = decode_manifest(read_small_file(file), str(file))
    check_links(file.parent, manifest)
    return manifest


def check_links(folder: Path, manifest: Manifest) -> None:
    """Refuse a file of the manifest that symbolic links take out of its folder.

    The hub's cache is the exception: it keeps the files of `snapshots/REVISION/` in `blobs/`, behind links.

    Raises:
        InputError: naming the first such file.
    """
    paths = (*(shard.path for shard in manifest.shards), *(carried.path for carried in manifest.files))
    for path, found in links_out_of(folder, paths):
        raise ManifestError(
            str(folder / path),
            f"is not in the checkpoint's folder: a link leads to {found}",
            "put the file itself there",
            code="manifest.link-out-of-folder",
        )


def links_out_of(folder: Path, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the paths below a folder that symbolic links take out of it, and where to; `check_links` says what not."""
    root = os.path.realpath(folder)
    snapshots, cache = os.path.basename(os.path.dirname(root)), os.path.dirname(os.path.dirname(root))
    allowed = (f"{root}/", f"{cache}/blobs/") if snapshots == "snapshots" else (f"{root.rstrip('/')}/",)
    for path in paths:
        found = os.path.realpath(folder / path)
        if not found.startswith(allowed):
            yield path, found


def no_manifest(where: str, path: Path | None = None) -> InputError:
    """Say that a place holds no manifest, and what is there instead at a `path` of this machine."""
    problem = f"no {MANIFEST_NAME} here"
    if path is None:
        return ManifestError(where, problem, _UNFINISHED, code="manifest.missing")
    folder = path.parent if path.name == MANIFEST_NAME else path
    if not folder.exists():
        hint = "name a folder that reshard pack has written"
        return ManifestError(where, "no such file or folder", hint, code="manifest.no-such-folder")
    if (folder / "config.json").exists() and not (folder / SOURCE_NAME).exists():
        command = f"reshard pack {shlex.quote(str(folder))} --layout SPEC --out DIR"
        return ManifestError(where, problem, f"pack it first: {command}", code="manifest.not-packed")
    # Names of a run's checkpoints grow with their steps.
    below = sorted((file.parent for file in folder.glob(f"*/{MANIFEST_NAME}")), key=lambda at: (len(at.name), at.name))
    hint = f"there is one in {below[-1]}" if below else _UNFINISHED
    return ManifestError(where, problem, hint, code="manifest.missing")


def open_shard(folder: Path, shard: Shard) -> Header:
    """Read a shard's header and check it against the manifest.

    Raises:
        InputError: absent, of another size, or with another digest than the manifest says.
    """
    path = folder / shard.path
    if not path.is_file():
        problem = "the manifest names this shard, and it is missing"
        raise ShardError(str(path), problem, _DAMAGED, code="shard.missing")
    check_shard(str(path), shard, path.stat().st_size)
    header = read_header(path)
    check_shard(str(path), shard, shard.nbytes, header)
    return header


def check_shard(where: str, shard: Shard, nbytes: int, header: Header | None = None) -> None:
    """Raise unless a file's size, and its header once that is read, are what the manifest says."""
    if nbytes != shard.nbytes:
        problem = f"expected {shard.nbytes} bytes (manifest.json), found {nbytes}"
        raise ShardError(where, problem, _DAMAGED, code="shard.wrong-size")
    if header is not None and header.digest != shard.digest:
        problem = f"header: expected {shard.digest} (manifest.json), found {header.digest}"
        raise ShardError(where, problem, code="shard.digest-mismatch")


def read_config(path: Path, digest: str | None = None) -> dict[str, Any]:
    """Read a config, of a model or a tokenizer, checking its digest when one is given.

    Raises:
        InputError: it cannot be read, is longer than any config, or is no object (see `parse_config`).
    """
    return parse_config(read_small_file(path, digest, most_nbytes=MAX_CONFIG_NBYTES), str(path))


def read_small_file(path: Path, digest: str | None = None, *, most_nbytes: int = _MAX_SMALL_NBYTES) -> bytes:
    """Read a whole file of at most 1 GiB, checking its digest when one is given."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            if os.fstat(file.fileno()).st_size > most_nbytes:
                problem = f"expected at most {most_nbytes} bytes"
                raise SourceError(str(path), problem, code="source.file-too-large")
            data = file.read()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise refused_by_system(str(path), error, code="store.unreadable") from error
        hint = "check the path for typos" if digest is None else "the manifest names it: copy it there again"
        raise refused_by_system(str(path), error, hint=hint, code="store.no-such-file") from error
    if digest is not None and digest_bytes(data) != digest:
        raise SourceError(
            str(path),
            f"expected {digest}, found {digest_bytes(data)}",
            "the file was changed or damaged after it was written",
            code="source.digest-mismatch",
        )
    return data


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit a checkpoint: everything else is in `folder` and on disk when this is called."""
    check_manifest(manifest)
    # Commit point: readers ignore a folder without manifest.json.
    write_file(folder / MANIFEST_NAME, encode_manifest(manifest))


def write_file(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file, given whole or in blocks, and its name to disk; an old one is replaced by a whole one.

    Raises:
        OSError: it cannot be written; the old one is as it was, and nothing else is left.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            for block in (data,) if isinstance(data, bytes) else data:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parent_of(root: Path, location: str = "") -> Parent:
    """Name the manifest in `root`, which came from `location`, as what another one descends from."""
    found = digest_bytes(read_small_file(root / MANIFEST_NAME))
    return Parent(location=location or str(root.resolve()), digest=found)
