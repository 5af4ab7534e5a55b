"""The shape of a model that the catalogue or its user describes, from its files or, for most, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping

from manifests.errors import ModelError, SourceError
from manifests.models.by_names import shape_by_names
from manifests.models.catalogue import CatalogueEntry, entry_of
from manifests.models.config import ConfigReader
from manifests.models.shape import ModelShape, StoredTensors
from manifests.models.sizes import filled, sizes_of, tensors_of
from manifests.schema import ModelDescription

__all__ = ["described_entry", "shape_by_catalogue"]


def shape_by_catalogue(
    architecture: str,
    config: Mapping[str, object],
    where: str,
    stored: StoredTensors | None = None,
    description: ModelDescription | None = None,
) -> ModelShape:
    """Return the shape of a model that the catalogue or a description has; see `model_shape`.

    Raises:
        ModelError: its sizes do not follow from its config; a description does not match the tensors.
        SourceError: tensors are missing, or not the model's.
    """
    entry = entry_of(architecture) if description is None else described_entry(description, architecture)
    assert entry is not None, architecture
    return shape_by_names(entry, ConfigReader(config, where), stored) if stored else _by_config(entry, config, where)


def described_entry(description: ModelDescription, architecture: str) -> CatalogueEntry:
    """Return what a description says in the form of the catalogue."""
    (layers, count), *more = zip(description.layers, description.count, strict=True)
    return CatalogueEntry(
        architecture=architecture,
        inputs=description.inputs,
        layers=layers,
        more_layers=tuple((layers, (count,)) for layers, count in more),
        outputs=description.outputs,
        count=(count,),
        width=(description.width,),
        kinds=tuple(map(frozenset, description.kinds)),
        ties=tuple((group[0], replica) for group in description.ties for replica in group[1:]),
        tied=description.tied,
        buffers=tuple(f".{name.removeprefix('.')}" for name in description.buffers),
        ignored=tuple(name.removeprefix(".") for name in description.ignored),
        mtp=description.mtp,
        spare=description.spare,
        is_described=True,
    )


def _by_config(entry: CatalogueEntry, config: Mapping[str, object], where: str) -> ModelShape:
    """Return the shape of a model whose files are not there; weights as they are before a quantization."""
    sizes = None if entry.is_described else sizes_of(entry.architecture)
    if sizes is None:
        raise _needs_weights(entry, where)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    reader = ConfigReader(filled(sizes, plain, where), where)
    try:
        return shape_by_names(entry, reader, StoredTensors(tensors=tensors_of(sizes, plain, where), where=where))
    except SourceError as error:  # a field adds tensors whose sizes have no formula
        raise _needs_weights(entry, where) from error


def _needs_weights(entry: CatalogueEntry, where: str) -> ModelError:
    return ModelError(
        f"{where}: architectures",
        f"the sizes of {entry.architecture}'s tensors are known from its weights, and config.json is alone",
        "give the folder with its safetensors; their headers are enough",
        code="config.needs-weights",
    )
