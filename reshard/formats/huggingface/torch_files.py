"""Names of `pytorch_model.bin` files, as transformers wrote before safetensors, and what an export writes for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from manifests.safetensors import encode_header, layout_tensors
from reshard.tensors.source_index import SUFFIX, KeptText, RecordedShard, index_anew
from stores.bundles import TensorAt

TORCH_NAME, TORCH_INDEX_NAME, TORCH_SUFFIX = "pytorch_model.bin", "pytorch_model.bin.index.json", ".bin"
_SHARD = re.compile(r"pytorch_model(?:-\d+-of-\d+)?\.bin")
_MAX_SHARD_NBYTES = 5 << 30  # of the files that an export writes; transformers' own default
_HF_ALIGNMENT = 8  # the safetensors library pads headers to this


def is_torch_shard(name: str) -> bool:
    """Return whether transformers would have written weights under this name."""
    return _SHARD.fullmatch(name) is not None


def recorded_as_safetensors(name: str, tensors: Sequence[TensorAt]) -> RecordedShard:
    """Return the safetensors file that an export writes in place of `pytorch_model*.bin`: the same tensors in order."""
    entries = layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    header = encode_header(entries, {"format": "pt"}, alignment=_HF_ALIGNMENT)
    return RecordedShard(name.removeprefix("pytorch_").removesuffix(TORCH_SUFFIX) + SUFFIX, header[8:])


def index_of(shards: Sequence[RecordedShard]) -> KeptText:
    """Return the index that an export of these files writes."""
    entries = {shard.name: shard.header.tensors for shard in shards}
    return index_anew(None, entries)


def recorded_anew(tensors: Sequence[TensorAt]) -> tuple[RecordedShard, ...]:
    """Return the safetensors files that an export writes: in order, each of at most 5 GiB, or of one tensor."""
    groups: list[list[TensorAt]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if groups[-1] and nbytes + tensor.nbytes > _MAX_SHARD_NBYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(tensor)
        nbytes += tensor.nbytes
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}" for number in range(1, count + 1)] if count > 1 else ["model"]
    return tuple(recorded_as_safetensors(name, group) for name, group in zip(names, groups, strict=True))
