"""Weight files by name, and their index."""

from __future__ import annotations

import re
from dataclasses import dataclass

from manifests.errors import SourceError
from manifests.jsontext import kind_of, parse_json_object
from manifests.safetensors import Header
from manifests.slices import SLICES_KEY
from reshard.tensors.source_index import SUFFIX
from stores.base import Folder, InputFile

SINGLE_NAME = "model.safetensors"  # the one file that transformers reads without an index
# Of files as transformers wrote before safetensors.
TORCH_NAME, TORCH_INDEX_NAME, TORCH_SUFFIX = "pytorch_model.bin", "pytorch_model.bin.index.json", ".bin"
_SHARD = re.compile(r"pytorch_model(?:-\d+-of-\d+)?\.bin")

_MERGE = (
    "merge the files of all ranks: transformers.distributed.consolidate_distributed_checkpoint(DIR, OUT); "
    "then copy config.json to OUT"
)
_RANK_OF_VLLM = re.compile(r"model-(?:pp-\d+-tp|rank)-\d+-part-\d+\.safetensors")
_RANK_OF_TORCH = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
_RANK_OF_MEGATRON = re.compile(r"(?:[^/]+/)?mp_rank_[\d_]+/(?:model_optim_rng|model_rng|distrib_optim)\.pt")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """The file of each tensor, and `metadata`, which transformers reads of every index; None if there is none."""

    weight_map: dict[str, str]
    metadata: object

    @property
    def total_size(self) -> object:
        return self.metadata.get("total_size") if isinstance(self.metadata, dict) else None


def read_shard_index(raw: bytes, where: str) -> ShardIndex:
    """Return what an index says."""
    document = parse_json_object(raw, where)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        problem = f"expected an object of file names, found {kind_of(weight_map)}"
        raise SourceError(f"{where}: weight_map", problem, code="source.bad-index")
    for fqn, listed in weight_map.items():
        if not isinstance(listed, str):
            place = f"{where}: weight_map[{fqn[:80]!r}]"
            raise SourceError(place, f"expected a file name, found {kind_of(listed)}", code="source.bad-index")
    return ShardIndex(weight_map=weight_map, metadata=document.get("metadata"))


def refuse_ranks(folder: Folder) -> None:
    """Raise if each rank wrote its own weights: vLLM's `sharded_state`, Megatron-LM's `torch`, or slices of tensors."""
    shards = [name for name in folder.names() if name.endswith(SUFFIX) and "/" not in name]
    if shards and all(map(_RANK_OF_VLLM.fullmatch, shards)):
        problem = "is of vLLM's sharded_state, which is not supported: expected the weights of the model"
        hint = "name the Hugging Face model that vLLM loaded; vLLM reads a packed folder as it is"
        raise SourceError(str(folder.file(shards[0])), problem, hint, code="source.vllm-sharded-state")
    if shards and all(map(_RANK_OF_TORCH.fullmatch, shards)):
        problem = "has slices of tensors, as one rank wrote them: expected the weights of the model"
        raise SourceError(str(folder.file(shards[0])), problem, _MERGE, code="source.layer-slices")
    ranks = [name for name in folder.names() if _RANK_OF_MEGATRON.fullmatch(name)]
    if ranks and not any(name.endswith((SUFFIX, TORCH_SUFFIX)) for name in folder.names()):
        problem = "is of Megatron-LM's format 'torch', which is not supported: expected 'torch_dist'"
        hint = "load it in Megatron-LM and save it again with --ckpt-format torch_dist"
        raise SourceError(str(folder.file(ranks[0])), problem, hint, code="source.megatron-format")


def refuse_slices(file: InputFile, header: Header) -> None:
    """Raise for slices of tensors, as torch's HuggingFaceStorageWriter leaves them; other `__metadata__` is copied.

    torch writes the offset alone, also of whole tensors; our own shards have the shape of the whole tensor, too.
    """
    text = header.metadata.get(SLICES_KEY)
    if text is None:
        return
    table = parse_json_object(text.encode(), f"{file}: __metadata__.{SLICES_KEY}")
    for entry in header.tensors:
        whole = {"saved_offsets": [0] * len(entry.shape), "shape": list(entry.shape)}
        part = table.get(entry.name, whole)
        if not isinstance(part, dict) or whole | part != whole:
            problem = f"is a slice {list(entry.shape)} of a tensor, as __metadata__ says: {str(part)[:80]}"
            raise SourceError(f"{file}: {entry.name!r}", problem, _MERGE, code="source.layer-slices")


def is_torch_shard(name: str) -> bool:
    """Return whether transformers would have written weights under this name."""
    return _SHARD.fullmatch(name) is not None
