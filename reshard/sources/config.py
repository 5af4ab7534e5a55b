"""A config.json alone: a model at its true size, planned before its weights are here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.errors import ModelError
from manifests.invariants import MANIFEST_NAME
from manifests.models import ModelShape, model_shape
from manifests.safetensors import nbytes_of
from manifests.schema import Source
from manifests.store import read_config
from reshard.sources.huggingface import CONFIG_NAME
from reshard.tensors.checkpoint import Checkpoint, TensorAt
from reshard.tensors.source_index import SourceRecord
from stores.local import LocalFile

__all__ = ["CONFIG_ONLY", "find_config", "open_config", "with_dtype"]

CONFIG_ONLY = "config"  # kind of source
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DEFAULT_DTYPE = "bfloat16"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 writes the first, 4 the second


def find_config(source: str) -> Path | None:
    """Give the config, if a source is nothing else: the file itself, or a folder that holds no other."""
    path = Path(source)
    if path.suffix == ".json" and path.name != MANIFEST_NAME and os.path.isfile(path):
        return path
    alone = os.path.isdir(path) and os.listdir(path) == [CONFIG_NAME]
    return path / CONFIG_NAME if alone else None


def open_config(path: Path) -> Checkpoint:
    """Make the checkpoint that a config promises. Its tensors have sizes, and no bytes anywhere.

    They are of the dtype that the config names, bfloat16 when it names none; quantized ones of theirs.

    Raises:
        InputError: no config of a known architecture, or a dtype that is not known.
    """
    config = read_config(path)
    shape = model_shape(config, str(path))
    dtype = _dtype(config, str(path))
    file, tied = LocalFile(path), {fqn for group in shape.ties for fqn in group[1:]}
    tensors = {}
    for fqn, dims in shape.tensors.items():
        if fqn not in tied:
            stored = _stored_dtype(fqn, shape, dtype)
            tensors[fqn] = TensorAt(fqn, stored, dims, file, 0, nbytes_of(stored, dims))
    return Checkpoint(
        shape=shape,
        tensors=tensors,
        carried=(),
        record=SourceRecord(shards=()),
        source=Source(kind=CONFIG_ONLY, location=str(path.resolve())),
    )


def with_dtype(config: Mapping[str, Any], stored: str) -> dict[str, Any]:
    """Give a config that names a dtype as files have it, wherever it names one: readers cast to that."""
    name = next(name for name, known in _DTYPES.items() if known == stored)
    return {**config, **{key: name for key in _DTYPE_KEYS if key in config}}


def _dtype(config: Mapping[str, object], where: str) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or _DEFAULT_DTYPE
    if not isinstance(name, str) or name not in _DTYPES:
        raise ModelError(
            f"{where}: dtype",
            f"{str(name)[:80]!r} is not known",
            f"known: {', '.join(_DTYPES)}",
            code="config.unknown-dtype",
        )
    return _DTYPES[name]


def _stored_dtype(fqn: str, shape: ModelShape, dtype: str) -> str:
    """Give the dtype of a tensor in files; see `manifests.models.quantized`."""
    if fqn.endswith(".weight_scale_inv"):
        return "F32"
    if f"{fqn}_scale_inv" in shape.tensors:
        return "F8_E4M3"
    if fqn.endswith((*shape.packed_suffixes, "_proj_scales")):
        return "U8"
    return dtype
