"""DeepSeek-V3 in Megatron-Core's `torch_dist` format as sparse files: torch writes all but the tensors' bytes.

Keys, shapes and chunks are those of megatron-core 0.16.1 with Transformer Engine, tensor parallelism of 2 and every
expert by itself; `.metadata` has the ranks' plans too, as Megatron-Core's has.
"""

from __future__ import annotations

import json
import os
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from reshard.formats.megatron.arguments import arguments_of

_TP = 2
Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]  # offset and shape


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseMegatron:
    num_tensors: int  # entries of the state dict
    num_chunks: int
    nbytes: int  # of the files, metadata included
    metadata_nbytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the state dict, which `cuts` divides along each axis into so many chunks."""

    key: str
    shape: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def chunks(self) -> Chunks:
        cuts = self.cuts or (1,) * len(self.shape)
        sizes = tuple(size // cut for size, cut in zip(self.shape, cuts, strict=True))
        return [
            (tuple(at * size for at, size in zip(where, sizes, strict=True)), sizes)
            for where in product(*map(range, cuts))
        ]


def write_sparse_megatron(folder: Path, config: Mapping[str, Any], num_ranks: int) -> SparseMegatron:
    """Write the folder of an iteration, in two files for each rank. It has no config.json, as Megatron writes none."""
    folder.mkdir(parents=True)
    entries = list(_entries(config))
    objects = list(_objects(entries, config["n_routed_experts"]))
    with TemporaryDirectory(dir=folder.parent) as scratch:
        files = _Files(folder, [f"__{rank}_{half}.distcp" for rank in range(num_ranks) for half in range(2)])
        templates: dict[tuple[torch.dtype, tuple[int, ...]], _Template] = {}
        stored: dict[dcp.MetadataIndex, _StorageInfo] = {}
        plans: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
        described: dict[str, Any] = {}
        for entry in entries:
            chunks = []
            for offset, shape in entry.chunks:
                if (entry.dtype, shape) not in templates:
                    templates[entry.dtype, shape] = _Template.of(shape, entry.dtype, Path(scratch, "template"))
                rank, info = files.add(templates[entry.dtype, shape])
                chunk = dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                index = dcp.MetadataIndex(entry.key, chunk.offsets)
                stored[index] = info
                chunks.append(chunk)
                properties = dcp.TensorProperties(dtype=entry.dtype)  # one for each chunk, as ranks describe them
                data = TensorWriteData(chunk, properties, torch.Size(entry.shape))
                plans[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            described[entry.key] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        torch.save([None], Path(scratch, "value"))
        value = _Template(Path(scratch, "value").read_bytes(), 0, b"")
        for key in objects:
            rank, stored[dcp.MetadataIndex(key)] = files.add(value)
            plans[rank].append(WriteItem(dcp.MetadataIndex(key), WriteItemType.BYTE_IO))
            described[key] = dcp.BytesStorageMetadata()
        files.close()
    written = pickle.loads(pickle.dumps(stored))  # ranks report it: no object of it is one of the plans'
    metadata: Any = dcp.Metadata(described, storage_data=written, version="1.0.0")
    metadata.all_local_plans = [SavePlan(items) for items in plans]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    mark = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(mark | {"common_backend_version": 1}))
    vocab = {"vocab_size": config["vocab_size"], "padded_vocab_size": config["vocab_size"]}
    known = arguments_of(config, "config.json") | vocab
    arguments = Namespace(**known, max_position_embeddings=config["max_position_embeddings"])
    torch.save({"args": arguments, "iteration": 1, "checkpoint_version": 3.0}, folder / "common.pt")
    return SparseMegatron(
        num_tensors=len(entries),
        num_chunks=len(stored) - len(objects),
        nbytes=sum(path.stat().st_size for path in folder.iterdir()),
        metadata_nbytes=(folder / ".metadata").stat().st_size,
    )


@dataclass(frozen=True, slots=True)
class _Template:
    """What torch.save writes: what precedes a tensor's bytes, their number, and what follows."""

    start: bytes
    data_nbytes: int
    end: bytes

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, path: Path) -> _Template:
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), path)
        begin = torch._C.PyTorchFileReader(str(path)).get_record_offset("data/0")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        with open(path, "rb") as file:
            start = file.read(begin)
            file.seek(begin + nbytes)
            return cls(start, nbytes, file.read())


class _Files:
    """Files that are filled in turn, without the bytes of tensors."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._names = list(names)
        self._descriptors = [os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in names]
        self._ends = [0] * len(names)
        self._turns = cycle(range(len(names)))

    def add(self, item: _Template) -> tuple[int, _StorageInfo]:
        """Write an item, and return its rank and where it is."""
        number = next(self._turns)
        begin, descriptor = self._ends[number], self._descriptors[number]
        os.pwrite(descriptor, item.start, begin)
        os.pwrite(descriptor, item.end, begin + len(item.start) + item.data_nbytes)
        nbytes = len(item.start) + item.data_nbytes + len(item.end)
        self._ends[number] += nbytes
        return number // 2, _StorageInfo(self._names[number], begin, nbytes)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def _entries(config: Mapping[str, Any]) -> Iterator[_Entry]:
    width, vocab = config["hidden_size"], config["vocab_size"]
    yield _Entry("embedding.word_embeddings.weight", (vocab, width), (_TP, 1))
    for layer in range(config["num_hidden_layers"]):
        has_experts = layer >= config["first_k_dense_replace"]
        yield from _layer(f"decoder.layers.{layer}", config, has_experts=has_experts)
    yield _Entry("decoder.final_layernorm.weight", (width,))
    yield _Entry("output_layer.weight", (vocab, width), (_TP, 1))
    for number in range(config["num_nextn_predict_layers"]):
        mtp = f"mtp.layers.{number}"
        yield from (_Entry(f"{mtp}.{norm}.weight", (width,)) for norm in ("enorm", "hnorm", "final_layernorm"))
        yield _Entry(f"{mtp}.eh_proj.weight", (width, 2 * width), (_TP, 1))
        yield from _layer(f"{mtp}.transformer_layer", config, has_experts=True)


def _layer(key: str, config: Mapping[str, Any], *, has_experts: bool) -> Iterator[_Entry]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rotary = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    attention = f"{key}.self_attention"
    yield _Entry(f"{key}.input_layernorm.weight", (width,))
    yield _Entry(f"{attention}.linear_q_down_proj.weight", (q_rank, width))
    yield _Entry(f"{attention}.linear_q_up_proj.layer_norm_weight", (q_rank,))
    yield _Entry(f"{attention}.linear_q_up_proj.weight", (heads * (plain + rotary), q_rank), (_TP, 1))
    yield _Entry(f"{attention}.linear_kv_down_proj.weight", (kv_rank + rotary, width))
    yield _Entry(f"{attention}.linear_kv_up_proj.layer_norm_weight", (kv_rank,))
    yield _Entry(f"{attention}.linear_kv_up_proj.weight", (heads * (plain + value), kv_rank), (_TP, 1))
    yield _Entry(f"{attention}.linear_proj.weight", (width, heads * value), (1, _TP))
    if not has_experts:
        yield _Entry(f"{key}.mlp.linear_fc1.layer_norm_weight", (width,))
        yield from _mlp(f"{key}.mlp", width, config["intermediate_size"])
        return
    ffn, count = config["moe_intermediate_size"], config["n_routed_experts"]
    yield _Entry(f"{key}.pre_mlp_layernorm.weight", (width,))
    yield _Entry(f"{key}.mlp.router.weight", (count, width))
    yield _Entry(f"{key}.mlp.router.expert_bias", (count,), dtype=torch.float32)
    yield _Entry(f"{key}.mlp.experts.experts.linear_fc1.weight", (count, 2 * ffn, width), (count, 2, 1))
    yield _Entry(f"{key}.mlp.experts.experts.linear_fc2.weight", (count, width, ffn), (count, 1, 1))
    yield from _mlp(f"{key}.mlp.shared_experts", width, ffn * config["n_shared_experts"])


def _mlp(key: str, width: int, ffn: int) -> Iterator[_Entry]:
    yield _Entry(f"{key}.linear_fc1.weight", (2 * ffn, width), (2 * _TP, 1))  # each rank has rows of gate and up
    yield _Entry(f"{key}.linear_fc2.weight", (width, ffn), (1, _TP))


def _objects(entries: Sequence[_Entry], num_experts: int) -> Iterator[str]:
    """Yield the keys of what Transformer Engine's modules have beside tensors: an entry for each expert of a layer."""
    for entry in entries:
        module, _, leaf = entry.key.rpartition(".")
        if leaf == "weight" and ".linear_" in entry.key:
            count = num_experts if ".experts.experts." in entry.key else 1
            yield from (f"{module}._extra_state/shard_{number}_{count}" for number in range(count))
