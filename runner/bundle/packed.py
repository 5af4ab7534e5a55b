"""A manifest as the runner opens it, with its config and the model shape derived from that. No torch.

Of a remote one, manifest, config and tokenizer are downloaded, the bundles are not.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import (
    DataError,
    ManifestError,
    ModelError,
    UsageError,
    system_errors,
)
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME, as_packed, check_model
from manifests.jsontext import parse_json_object
from manifests.models import ModelShape, StoredTensors, is_sized_by_files, model_shape
from manifests.models.config import without_ties
from manifests.models.trainable import check_trainable
from manifests.paths import is_file
from manifests.safetensors import parse_header
from manifests.schema import Manifest
from manifests.store import file_digest, read_config, read_small_file, write_file
from stores.address import is_url
from stores.base import Blocks, Folder, check_whole
from stores.bundles import Bundles
from stores.folders.publish import temporary_folder
from stores.local import LocalFile
from stores.open import Address, ReadManifest, open_manifest

TOKENIZER = "tokenizer.json"
_READ_BY_NAME = (TOKENIZER, "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A manifest in the folder `root`, checked against its config. Its bundles are in the folder too, or in `store`."""

    root: Path
    read: ReadManifest
    config: Mapping[str, Any]
    shape: ModelShape
    store: Folder | None

    @property
    def manifest(self) -> Manifest:
        return self.read.manifest

    @property
    def where(self) -> str:
        return f"{self.location}/{MANIFEST_NAME}"

    @property
    def location(self) -> str:
        return self.store.location if self.store else str(self.root)

    @property
    def bundles(self) -> Bundles:
        return Bundles(self.manifest, self.store or self.root)

    @property
    def tokenizer(self) -> str | None:
        """The digest of tokenizer.json, if the checkpoint has one."""
        return file_digest(self.manifest, TOKENIZER)

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The files that are read although the manifest does not list them, so they cannot be verified."""
        named = {file.path for file in self.manifest.files}
        return tuple(name for name in _READ_BY_NAME if name not in named and (self.root / name).exists())

    @property
    def stage_modules(self) -> tuple[tuple[str, ...], ...]:
        return tuple(stage.modules for stage in self.manifest.stages)


def open_packed(source: Address | ReadManifest, copied_to: Path | None = None) -> Packed:
    """Open a manifest, unless it has been read, read its config, and verify the auxiliary files.

    A remote manifest and its auxiliary files are `copied_to` a folder of this machine.
    """
    read = source if isinstance(source, ReadManifest) else open_manifest(source)
    manifest, folder = read.manifest, copied_to or read.root
    path = folder / "config.json"
    digest = file_digest(manifest, path.name)
    if digest is None:
        raise ManifestError(
            str(folder / MANIFEST_NAME), f"does not list {path.name} among its files", code="manifest.missing-file"
        )
    config = read_config(path, digest)
    for auxiliary in manifest.files:
        with system_errors(folder / auxiliary.path, code="store.unreadable"):
            is_missing = not is_file(folder / auxiliary.path)
        if is_missing:
            hint = "copy the checkpoint again: the file was removed after it was written"
            raise ManifestError(
                str(folder / auxiliary.path),
                "is missing, although the manifest lists it",
                hint,
                code="manifest.missing-file",
            )
        check_whole(LocalFile(folder / auxiliary.path), auxiliary.compared_digest)
    if config.get("quantization_config"):
        raise ModelError(
            f"{path}: quantization_config",
            "training on quantized weights is not supported",
            f"reshard pack {shlex.quote(str(folder / MANIFEST_NAME))} --layout SPEC --dequantize bf16 --out DIR",
            code="model.quantized",
        )
    description = manifest.model.description
    stored = _read_stored(folder, manifest) if is_sized_by_files(config, str(path), description) else None
    shape = as_packed(model_shape(config, str(path), stored, description), manifest)
    if description is None and not shape.ties:  # models are built of it, or of its text_config
        config = without_ties(config)
    check_model(manifest, shape, str(folder / MANIFEST_NAME))
    modules = {module for stage in manifest.stages for module in stage.modules}
    shape = shape.without(shape.optional.difference(modules))  # a config may count MTP layers that files lack
    return Packed(root=folder, read=read, config=config, shape=shape, store=read.folder if copied_to else None)


@contextmanager
def opened(manifest: str, *, is_staged: bool) -> Iterator[tuple[str, Packed]]:
    """Yield the address for ranks to open, and the opened manifest, until the block ends."""
    if not is_url(manifest):
        read = open_manifest(manifest)
        _check_trainable(read)
        yield str(read.root / read.name), open_packed(read)
        return
    if not is_staged:
        raise UsageError(
            manifest,
            "is not on this machine, and ranks read bundles from a local file system",
            "add --stage-to-local DIR, which copies the bundles of a node's ranks to its own disk",
            code="options.remote-manifest",
        )
    read = open_manifest(manifest)
    with temporary_folder("runner-") as folder:
        revision = f"@{read.folder.revision}" if read.folder.revision else ""  # a branch of the hub may change
        yield read.folder.location + revision, fetch(read, folder)


def fetch(read: ReadManifest, folder: Path) -> Packed:
    """Download a manifest's auxiliary files to a folder, verify them, write the manifest, and open it there.

    Several processes may do so at once: each file gets its name when it is whole, the manifest last.
    """
    _check_trainable(read)
    with system_errors(folder, "cannot be written", code="output.unwritable", names_file=True):
        for auxiliary in read.manifest.files:
            path = folder / auxiliary.path
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, Blocks(read.folder.file(auxiliary.path), auxiliary.compared_digest), is_durable=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / MANIFEST_NAME, read.data, is_durable=False)
    return open_packed(read, copied_to=folder)


def check_tokenizer(folder: Path, otherwise: str = "") -> Path:
    """Return the path of a checkpoint folder's tokenizer.json, after checking that it exists."""
    file = folder / TOKENIZER
    if not file.exists():
        raise DataError(
            str(file), "no such file", f"pack the model with its tokenizer{otherwise and f', or {otherwise}'}",
            code="tokenizer.missing",
        )  # fmt: skip
    return file


def name_of(location: str) -> str:
    """Return the last part of a path or address."""
    return location.rstrip("/").rpartition("/")[2]


def _read_stored(folder: Path, manifest: Manifest) -> StoredTensors:
    """Return the names and shapes of the tensors of a manifest's source, without those that were dropped."""
    path = folder / SOURCE_NAME
    digest = file_digest(manifest, SOURCE_NAME)
    if digest is None:
        raise ManifestError(
            str(folder / MANIFEST_NAME), f"{SOURCE_NAME} is not among its files", code="manifest.missing-file"
        )
    record = parse_json_object(read_small_file(path, digest), str(path))
    shards, dropped = record.get("shards"), record.get("dropped")
    if not isinstance(shards, list) or not isinstance(dropped, list):
        raise ManifestError(str(path), "expected lists of shards and dropped", code="manifest.bad-source-record")
    tensors = {}
    for position, shard in enumerate(shards):
        text = shard.get("header") if isinstance(shard, dict) else None
        if not isinstance(text, str):
            place = f"{path}: shards[{position}].header"
            raise ManifestError(place, "expected a string", code="manifest.bad-source-record")
        header = parse_header(text.encode(), data_nbytes=None, where=f"{path}: shards[{position}]")
        tensors.update({entry.name: entry.shape for entry in header.tensors if entry.name not in dropped})
    return StoredTensors(tensors=tensors, where=str(path))


def _check_trainable(read: ReadManifest) -> None:
    model = read.manifest.model
    check_trainable(model.architecture, is_described=model.description is not None)
