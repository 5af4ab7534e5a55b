"""The output of `reshard inspect` for DCP, DeepSpeed and pytorch_model*.bin: what their tables say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from manifests.command.sizes import show_bytes
from manifests.errors import printable
from manifests.safetensors import nbytes_of
from reshard.archives.dcp import read_metadata
from reshard.archives.names import METADATA_NAME, is_deepspeed, is_megatron
from reshard.archives.tensors import read_archive
from reshard.formats.deepspeed.read import read_step
from reshard.formats.deepspeed.step import find_step
from reshard.formats.huggingface.torch_files import is_torch_shard
from reshard.formats.megatron.tracker import find_iteration
from reshard.report.text import table
from stores.base import Folder
from stores.bundles import TensorAt
from stores.open import open_store

_MODEL = "model"
_KINDS = {
    "dcp": "torch.distributed.checkpoint",
    "bin": "torch.save files",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-Core's torch_dist",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    name: str
    part: str  # of the state dict: `model`, `optimizer`
    dtype: str
    shape: tuple[int, ...]
    num_chunks: int

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """A checkpoint's tensors, and the parts of its state dict that have other values."""

    location: str
    format: Literal["dcp", "bin", "deepspeed", "megatron"]
    num_files: int
    tensors: tuple[_Tensor, ...]
    others: tuple[str, ...] = ()


def find_archive(source: str) -> Archive | None:
    """Return what a folder of such files has; None if it is another kind of source.

    Raises:
        SourceError: the files are damaged, or their pickles not of tensors.
        InputError: they cannot be read.
    """
    folder = find_iteration(source, open_store(source))
    names = folder.names()
    if METADATA_NAME in names:
        return _read_dcp(folder, source)
    if is_deepspeed(names):
        return _read_deepspeed(folder, source)
    shards = sorted(filter(is_torch_shard, names))
    if not shards:
        return None
    found = [tensor for name in shards for tensor in read_archive(folder.file(name))]
    tensors = (_Tensor(name=one.name, part=_MODEL, dtype=one.dtype, shape=one.shape, num_chunks=1) for one in found)
    return Archive(location=source, format="bin", num_files=len(shards), tensors=tuple(tensors))


def archive_json(found: Archive, with_tensors: bool) -> dict[str, Any]:
    parts = {part: {"num_tensors": num, "nbytes": nbytes} for part, num, nbytes in _parts(found)}
    listed = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "num_chunks": tensor.num_chunks,
        }
        for tensor in found.tensors
    ]
    head = {"version": 1, "format": found.format, "num_files": found.num_files, "parts": parts}
    return {**head, "other_parts": list(found.others), **({"tensors": listed} if with_tensors else {})}


def archive_text(found: Archive, with_tensors: bool) -> str:
    kind = _KINDS[found.format]
    rows = [(part, str(num), show_bytes(nbytes)) for part, num, nbytes in _parts(found)]
    lines = [f"{kind}, {found.num_files} files", table(("part", "tensors", "bytes"), rows, left=frozenset({"part"}))]
    if found.others:
        lines.append(f"other values: {', '.join(found.others)}")
    if with_tensors:
        columns = ("tensor", "dtype", "shape", "chunks")
        listed = [(one.name, one.dtype, str(list(one.shape)), str(one.num_chunks)) for one in found.tensors]
        lines.append(table(columns, listed, left=frozenset(columns[:3])))
    return printable("\n".join(lines))


def _read_dcp(folder: Folder, source: str) -> Archive:
    saved = read_metadata(folder)
    tensors = tuple(
        _Tensor(
            name=tensor.name,
            part=_MODEL if len(tensor.keys) == 1 else str(tensor.keys[0]),
            dtype=tensor.dtype,
            shape=tensor.chunks[0].region.whole_shape,
            num_chunks=len(tensor.chunks),
        )
        for tensor in saved.tensors
    )
    paths = {chunk.path for tensor in saved.tensors for chunk in tensor.chunks}
    others = {str(value.keys[0]) for value in saved.values.values()}
    kind: Literal["dcp", "megatron"] = "megatron" if is_megatron(folder.names()) else "dcp"
    return Archive(location=source, format=kind, num_files=len(paths), tensors=tensors, others=tuple(sorted(others)))


def _read_deepspeed(folder: Folder, source: str) -> Archive:
    saved = read_step(find_step(folder, needs_config=False))
    parts: dict[str, Mapping[str, TensorAt]] = {
        _MODEL: saved.weights,
        **{str(kind): saved.moments[kind] for kind in saved.moments},
    }
    tensors = tuple(
        _Tensor(name=name, part=part, dtype=tensor.dtype, shape=tensor.shape, num_chunks=1)
        for part, by_name in parts.items()
        for name, tensor in by_name.items()
    )
    return Archive(location=source, format="deepspeed", num_files=len(saved.files), tensors=tensors)


def _parts(found: Archive) -> list[tuple[str, int, int]]:
    """Return each part with its number of tensors and their bytes."""
    parts = {tensor.part: (0, 0) for tensor in found.tensors}
    for tensor in found.tensors:
        num, nbytes = parts[tensor.part]
        parts[tensor.part] = (num + 1, nbytes + tensor.nbytes)
    return [(part, num, nbytes) for part, (num, nbytes) in parts.items()]
