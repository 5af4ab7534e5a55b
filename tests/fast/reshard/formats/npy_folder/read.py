"""A format of these tests: a folder of `TENSOR.npy` files and a config.json."""

from __future__ import annotations

import io

from numpy.lib import format as npy

from manifests.models import model_shape
from manifests.models.config import CONFIG_NAME
from manifests.schema import Source
from reshard.formats.huggingface.read import auxiliary_files
from reshard.formats.huggingface.torch_files import recorded_anew
from reshard.formats.table import ListedTensor, Listing, OpenOptions
from reshard.tensors.checkpoint import Checkpoint, OriginalFiles
from reshard.tensors.comparison import check_coverage
from reshard.tensors.source_index import SourceRecord
from stores.base import Folder, read_config, read_whole
from stores.bundles import TensorAt

SUFFIX = ".npy"


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    config = read_config(folder.file(CONFIG_NAME))
    shape, tensors = model_shape(config), _tensors(folder)
    check_coverage(tensors, shape, str(folder))
    ordered = {fqn: tensors[fqn] for fqn in shape.tensors}
    files = {name: folder.file(name) for name in folder.names() if name.endswith(SUFFIX)}
    return Checkpoint(
        shape=shape,
        tensors=ordered,
        auxiliary=auxiliary_files(folder, folder.names(), set(files)),
        record=SourceRecord(shards=recorded_anew(list(ordered.values()))),
        source=Source(kind=folder.kind, location=folder.location, revision=None),
        originals=OriginalFiles(location=folder.location, revision=None, files=files),
    )


def list_tensors(folder: Folder) -> Listing:
    tensors = _tensors(folder).values()
    return Listing(
        format="npy",
        title="NumPy",
        num_files=len(tensors),
        tensors=tuple(ListedTensor(name=at.name, part="model", dtype=at.dtype, shape=at.shape) for at in tensors),
    )


def _tensors(folder: Folder) -> dict[str, TensorAt]:
    tensors = {}
    for name in folder.names():
        if name.endswith(SUFFIX):
            file, fqn = folder.file(name), name.removesuffix(SUFFIX)
            raw = io.BytesIO(read_whole(file))
            npy.read_magic(raw)
            shape, _, dtype = npy.read_array_header_1_0(raw)
            tensors[fqn] = TensorAt(fqn, {"<f4": "F32"}[dtype.str], shape, file, raw.tell(), file.nbytes - raw.tell())
    return tensors
