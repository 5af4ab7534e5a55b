"""A format of these tests: a folder of `TENSOR.npy` files and a config.json."""

from __future__ import annotations

import io

from numpy.lib import format as npy

from reshard.formats.assemble import ModelTensors, config_in, read_model_config
from reshard.formats.auxiliary import auxiliary_files
from reshard.formats.table import ListedTensor, Listing, OpenOptions
from reshard.tensors.checkpoint import Checkpoint
from stores.base import Folder, read_whole
from stores.bundles import TensorAt

SUFFIX = ".npy"


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    config = read_model_config(config_in(folder), options.description)
    model = ModelTensors.cover(_tensors(folder), config, options, str(folder))
    files = [name for name in folder.names() if name.endswith(SUFFIX)]
    return model.checkpoint(folder, files, auxiliary_files(folder, folder.names(), set(files)), ())


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
