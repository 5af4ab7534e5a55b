"""A config.json alone: a model that can be planned without its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from manifests.errors import ModelError
from manifests.invariants import MANIFEST_NAME
from manifests.models import ModelShape, architecture_of, check_experts, check_readable, is_sized_by_files, model_shape
from manifests.models.config import CONFIG_NAME
from manifests.safetensors import nbytes_of
from manifests.schema import Source
from manifests.store import read_config
from reshard.formatting import list_words
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.source_index import SourceRecord
from reshard.transforms.cast import CONFIG_DTYPES
from stores.bundles import TensorAt
from stores.local import LocalFile

CONFIG_ONLY = "config"  # kind of source
_DEFAULT_DTYPE = "bfloat16"


def find_config(source: str) -> Path | None:
    """Return the config of a source without weights: the file itself, or the only file of a folder."""
    path = Path(source)
    if path.suffix == ".json" and path.name != MANIFEST_NAME and os.path.isfile(path):
        return path
    alone = os.path.isdir(path) and os.listdir(path) == [CONFIG_NAME]
    return path / CONFIG_NAME if alone else None


def open_config(path: Path) -> Checkpoint:
    """Return the checkpoint that a config describes: tensors with sizes, but no bytes.

    Their dtype is the config's, bfloat16 by default; quantized ones have their own.

    Raises:
        SourceError: the file is not JSON.
        ModelError: an unknown architecture or dtype.
    """
    config = read_config(path)
    shape = _shape_of(config, str(path))
    dtype = _dtype(config, str(path))
    file, tied = LocalFile(path), {fqn for group in shape.ties for fqn in group[1:]}
    tensors, begin = {}, 0  # as if all were in one file, in this order
    for fqn, dims in shape.tensors.items():
        if fqn not in tied:
            stored = _stored_dtype(fqn, shape, dtype)
            tensors[fqn] = TensorAt(fqn, stored, dims, file, begin, nbytes_of(stored, dims))
            begin = tensors[fqn].end
    return Checkpoint(
        shape=shape,
        tensors=tensors,
        auxiliary=(),
        record=SourceRecord(shards=()),
        source=Source(kind=CONFIG_ONLY, location=str(path.resolve())),
    )


def _shape_of(config: Mapping[str, object], where: str) -> ModelShape:
    if not is_sized_by_files(config, where):
        return model_shape(config, where)
    from reshard.estimate.meta_model import tensors_by_class

    check_readable(config, where)
    check_experts(config, where)
    whole, tensors = tensors_by_class(config, architecture_of(config, where), where)
    return model_shape(whole, where, tensors)


def _dtype(config: Mapping[str, object], where: str) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or _DEFAULT_DTYPE
    if not isinstance(name, str) or name not in CONFIG_DTYPES:
        raise ModelError(
            f"{where}: dtype",
            f"expected {list_words(CONFIG_DTYPES)}, found {str(name)[:80]!r}",
            code="config.unknown-dtype",
        )
    return CONFIG_DTYPES[name]


def _stored_dtype(fqn: str, shape: ModelShape, dtype: str) -> str:
    """Return the stored dtype of a tensor; see `manifests.models.quantized`."""
    if fqn.endswith(".weight_scale_inv"):
        return "F32"
    if f"{fqn}_scale_inv" in shape.tensors:
        return "F8_E4M3"
    if fqn.endswith((*shape.packed_suffixes, "_proj_scales")):
        return "U8"
    return dtype
