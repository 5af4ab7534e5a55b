"""The shape of a model that the catalogue or its user describes, from its files."""

from __future__ import annotations

from collections.abc import Mapping

from manifests.errors import ModelError
from manifests.models.by_names import shape_by_names
from manifests.models.catalogue import CatalogueEntry, entry_of
from manifests.models.config import ConfigReader
from manifests.models.shape import ModelShape, StoredTensors
from manifests.schema import ModelDescription


def shape_by_catalogue(
    architecture: str,
    config: Mapping[str, object],
    where: str,
    stored: StoredTensors | None = None,
    description: ModelDescription | None = None,
) -> ModelShape:
    """Return the shape of a model that the catalogue or a description has; see `model_shape`.

    Raises:
        ModelError: there are no stored tensors; a description does not match them.
        SourceError: tensors are missing, or not the model's.
    """
    entry = entry_of(architecture) if description is None else described_entry(description, architecture)
    assert entry is not None, architecture
    if stored is None:
        raise ModelError(
            f"{where}: architectures",
            f"the sizes of {entry.architecture}'s tensors are known from its weights, and config.json is alone",
            "give the folder with its safetensors; their headers are enough",
            code="config.needs-weights",
        )
    return shape_by_names(entry, ConfigReader(config, where), stored)


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
