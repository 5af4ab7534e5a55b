"""A manifest as the runner opens it, with the model that its config promises. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import (
    DataError,
    ManifestError,
    ModelError,
)
from manifests.invariants import MANIFEST_NAME, check_model
from manifests.jsontext import parse_json_object
from manifests.models import ModelShape, model_shape
from manifests.schema import Manifest
from manifests.store import read_manifest, read_small_file
from stores.base import Folder, check_whole
from stores.bundles import Bundles
from stores.local import LocalFile

__all__ = ["TOKENIZER", "Packed", "check_tokenizer", "open_packed"]

TOKENIZER = "tokenizer.json"
_READ_BY_NAME = (TOKENIZER, "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A manifest in the folder `root`, seen to hold its config's model. Its bundles are there too, or in a `store`."""

    root: Path
    manifest: Manifest
    config: Mapping[str, Any]
    shape: ModelShape
    store: Folder | None = None

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
        """The digest of tokenizer.json, if there is one."""
        return _digest_of(TOKENIZER, self.manifest)

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The files that are read here though the manifest does not name them, so that nothing verifies them."""
        named = {file.path for file in self.manifest.files}
        return tuple(name for name in _READ_BY_NAME if name not in named and (self.root / name).exists())

    @property
    def stage_modules(self) -> tuple[tuple[str, ...], ...]:
        return tuple(stage.modules for stage in self.manifest.stages)


def open_packed(folder: Path) -> Packed:
    """Read a manifest and its config, and verify the small files beside them.

    Raises:
        InputError: one of them cannot be read or is not what the manifest says, the weights are quantized, or the
            stages do not hold the config's model.
    """
    manifest, path = read_manifest(folder), folder / "config.json"
    digest = _digest_of(path.name, manifest)
    if digest is None:
        raise ManifestError(
            str(folder / MANIFEST_NAME), f"{path.name} is not among its files", code="manifest.missing-file"
        )
    config = parse_json_object(read_small_file(path, digest), str(path))
    for carried in manifest.files:  # a tokenizer is read by others, and a checkpoint copies them all
        if not (folder / carried.path).is_file():
            hint = "copy the checkpoint again: it was removed after it was written"
            raise ManifestError(
                str(folder / carried.path),
                "the manifest names this file, and it is missing",
                hint,
                code="manifest.missing-file",
            )
        check_whole(LocalFile(folder / carried.path), carried.digest)
    if config.get("quantization_config"):
        raise ModelError(
            f"{path}: quantization_config",
            "the weights are stored quantized, and the runner reads plain ones",
            f"reshard pack {folder / MANIFEST_NAME} --layout SPEC --dequantize bf16 --out DIR",
            code="model.quantized",
        )
    shape = model_shape(config, str(path))
    check_model(manifest, shape, str(folder / MANIFEST_NAME))
    return Packed(root=folder, manifest=manifest, config=config, shape=shape)


def check_tokenizer(folder: Path, otherwise: str = "") -> Path:
    """Give the file of a checkpoint folder's tokenizer, having seen that it is there.

    Raises:
        InputError: it is not; the hint says what can be done `otherwise`, if anything can.
    """
    file = folder / TOKENIZER
    if not file.exists():
        raise DataError(
            str(file), "no such file", f"pack the model with its tokenizer{otherwise and f', or {otherwise}'}",
            code="tokenizer.missing",
        )  # fmt: skip
    return file


def _digest_of(name: str, manifest: Manifest) -> str | None:
    return next((file.digest for file in manifest.files if file.path == name), None)
