"""Files of a checkpoint folder: checked reads and atomic writes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.codec import encode_manifest
from manifests.digest import digest_bytes
from manifests.errors import InputError, ManifestError, ShardError, SourceError, refused_by_system, system_errors
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME, check_manifest
from manifests.jsontext import MAX_CONFIG_NBYTES, parse_config
from manifests.models.adapters import PEFT_CONFIG, merge_hint
from manifests.paths import is_file, open_regular
from manifests.safetensors import Header, read_header
from manifests.schema import Manifest, Shard

_MAX_SMALL_NBYTES = 1 << 30
_STEP = re.compile(r"step-\d{6,18}")
_UNFINISHED = "the output is unfinished or not packed; pack a model with reshard pack SOURCE --layout SPEC --out DIR"
_DAMAGED = "the shard was changed or removed after it was written; copy or write the checkpoint again"


def check_links(folder: Path, manifest: Manifest) -> None:
    """Refuse symbolic links that lead from a file of the manifest out of its folder.

    The hub's cache is an exception: the files of `snapshots/REVISION/` are links into `blobs/`.
    """
    paths = (*(shard.path for shard in manifest.shards), *(file.path for file in manifest.files))
    for path, target in links_out_of(folder, paths):
        raise ManifestError(
            str(folder / path),
            f"expected a file in the checkpoint's folder, found a link to {target}",
            "replace the link with the file",
            code="manifest.link-out-of-folder",
        )


def links_out_of(folder: Path, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the paths whose symbolic links lead out of a folder, and their targets; see `check_links`."""
    root = os.path.realpath(folder)
    snapshots, cache = os.path.basename(os.path.dirname(root)), os.path.dirname(os.path.dirname(root))
    allowed = (f"{root}/", f"{cache}/blobs/") if snapshots == "snapshots" else (f"{root.rstrip('/')}/",)
    for path in paths:
        target = os.path.realpath(folder / path)
        if not target.startswith(allowed):
            yield path, target


def file_digest(manifest: Manifest, path: str) -> str | None:
    """Return the digest of an auxiliary file; None if a manifest does not list it."""
    return next((file.digest for file in manifest.files if file.path == path), None)


def no_manifest(where: str, path: Path | None = None) -> InputError:
    """Return an error about a missing manifest; the hint depends on what is found at a local `path`."""
    problem = f"no {MANIFEST_NAME} found"
    if path is None:
        return ManifestError(where, problem, _UNFINISHED, code="manifest.missing")
    folder = path.parent if path.name == MANIFEST_NAME else path
    if not folder.exists():
        hint = "expected an output of reshard pack; check the path for typos"
        return ManifestError(where, "no such file or folder", hint, code="manifest.no-such-folder")
    if (folder / "config.json").exists() and not (folder / SOURCE_NAME).exists():
        command = f"reshard pack {shlex.quote(str(folder))} --layout SPEC --out DIR"
        return ManifestError(where, problem, f"pack it first: {command}", code="manifest.not-packed")
    below = newest_below(folder)
    hint = f"did you mean {shlex.quote(str(below))}?" if below else _UNFINISHED
    if (folder / PEFT_CONFIG).exists():
        hint = merge_hint(str(folder))
    return ManifestError(where, problem, hint, code="manifest.missing")


def newest_below(folder: Path) -> Path | None:
    """Return the last of the checkpoints in a folder, whose names get longer as the step number grows.

    Hidden folders are unfinished or removed ones. A folder not named after a step is returned only if none is.
    """
    below = (file.parent for file in folder.glob(f"*/{MANIFEST_NAME}") if not file.parent.name.startswith("."))
    return max(below, key=lambda at: (bool(_STEP.fullmatch(at.name)), len(at.name), at.name), default=None)


def open_shard(folder: Path, shard: Shard) -> Header:
    """Read a shard's header, and check it against the manifest."""
    path = folder / shard.path
    with system_errors(path, code="store.unreadable"):
        if not is_file(path):
            raise ShardError(str(path), "missing shard (manifest.json)", _DAMAGED, code="shard.missing")
        nbytes = path.stat().st_size
    check_shard(str(path), shard, nbytes)
    header = read_header(path)
    check_shard(str(path), shard, shard.nbytes, header)
    return header


def check_shard(where: str, shard: Shard, nbytes: int, header: Header | None = None) -> None:
    """Check a file's size, and its header if it was read, against the manifest."""
    if nbytes != shard.nbytes:
        problem = f"expected {shard.nbytes} bytes (manifest.json), found {nbytes}"
        raise ShardError(where, problem, _DAMAGED, code="shard.wrong-size")
    if header is not None and header.digest != shard.digest:
        problem = f"header: expected {shard.digest} (manifest.json), found {header.digest}"
        raise ShardError(where, problem, _DAMAGED, code="shard.digest-mismatch")


def read_config(path: Path, digest: str | None = None) -> dict[str, Any]:
    """Read the config of a model or a tokenizer, and check its digest if one is passed."""
    return parse_config(read_small_file(path, digest, most_nbytes=MAX_CONFIG_NBYTES), str(path))


def read_small_file(path: Path, digest: str | None = None, *, most_nbytes: int = _MAX_SMALL_NBYTES) -> bytes:
    """Read a whole file of at most 1 GiB, or `most_nbytes`, and check its digest if one is passed."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            if os.fstat(file.fileno()).st_size > most_nbytes:
                problem = f"expected at most {most_nbytes} bytes"
                raise SourceError(str(path), problem, code="source.file-too-large")
            data = file.read()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise refused_by_system(str(path), error, code="store.unreadable") from error
        hint = "check the path for typos" if digest is None else "the manifest lists this file; copy it there again"
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
    """Commit a checkpoint: all other files must be in `folder` and fsynced."""
    check_manifest(manifest)
    # Commit point: readers ignore a folder without manifest.json.
    write_file(folder / MANIFEST_NAME, encode_manifest(manifest))


def write_file(path: Path, data: bytes | Iterable[bytes | memoryview], *, is_durable: bool = True) -> None:
    """Write a file whole or not at all from bytes or blocks, replacing an old one: beside it first, then by a rename.

    Unless `is_durable`, the file may be lost with the power, and processes of several machines may write it at once.
    """
    partial = path.with_name(f".{path.name}.partial" if is_durable else f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        with open(partial, "wb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that its entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
