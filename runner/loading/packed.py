"""A manifest as the runner opens it, with the model that its config promises. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME, check_model
from manifests.jsontext import parse_json_object
from manifests.models import ModelShape, model_shape
from manifests.schema import Manifest
from manifests.store import read_manifest, read_small_file
from stores.base import Folder
from stores.bundles import Bundles

__all__ = ["TOKENIZER", "Packed", "check_tokenizer", "open_packed"]

TOKENIZER = "tokenizer.json"


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
    def stage_modules(self) -> tuple[tuple[str, ...], ...]:
        return tuple(stage.modules for stage in self.manifest.stages)


def open_packed(folder: Path) -> Packed:
    """Read a manifest and its config.

    Raises:
        InputError: one of them cannot be read, the weights are quantised, or the stages do not hold the
            config's model.
    """
    manifest, path = read_manifest(folder), folder / "config.json"
    digest = _digest_of(path.name, manifest)
    if digest is None:
        raise InputError(str(folder / MANIFEST_NAME), f"{path.name} is not among its files")
    config = parse_json_object(read_small_file(path, digest), str(path))
    if config.get("quantization_config"):
        raise InputError(
            f"{path}: quantization_config",
            "the weights are stored quantised, and the runner reads plain ones",
            f"reshard pack {folder / MANIFEST_NAME} --layout SPEC --dequantise bf16 --out DIR",
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
        raise InputError(
            str(file), "no such file", f"pack the model with its tokenizer{otherwise and f', or {otherwise}'}"
        )
    return file


def _digest_of(name: str, manifest: Manifest) -> str | None:
    return next((file.digest for file in manifest.files if file.path == name), None)
