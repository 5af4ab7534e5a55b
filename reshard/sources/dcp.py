"""A folder of torch.distributed.checkpoint (DCP), such as torchtitan's `step-1000`, with the model's config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from manifests.errors import SourceError
from manifests.models import is_sized_by_files, model_shape
from manifests.schema import ModelDescription, Source
from reshard.archives.dcp import DcpTensor, read_chunk, read_metadata
from reshard.archives.names import DATA_SUFFIX, METADATA_NAME
from reshard.sources.huggingface import (
    CONFIG_NAME,
    auxiliary_files,
    check_coverage,
    drop_tensors,
    stored_in,
    under_fqns,
    without_absent,
)
from reshard.sources.torch_files import index_of, recorded_as_safetensors
from reshard.sources.torchtitan import has_torchtitan_names, under_huggingface_names
from reshard.tensors.checkpoint import Checkpoint, OriginalFiles, TensorAt
from reshard.tensors.slices import merge_slices
from reshard.tensors.source_index import RecordedShard, SourceRecord
from stores.base import Folder, read_config
from stores.bundles import join_slices

__all__ = ["open_dcp", "read_dcp_tensors", "read_dcp_weights"]

_MODEL_KEY = "model"  # of a nested state dict: {"model": model.state_dict(), "optimizer": ...}
_MAX_SHARD_NBYTES = 5 << 30  # of the files that an export writes; transformers' own default


def open_dcp(
    folder: Folder, drop: frozenset[str] = frozenset(), description: ModelDescription | None = None
) -> Checkpoint:
    """Read a DCP folder's metadata and check that its weights cover the model exactly; other entries are left out.

    Weights have Hugging Face's names or torchtitan's, at the top of the state dict that was saved or under `model`.
    They are packed whole, however they were sharded.

    Raises:
        SourceError: no config.json, damaged files, or tensors missing, unknown or of the wrong shape.
        ModelError: an invalid config, an unsupported architecture, or a description of another model.
        ShardError: the chunks of a tensor are not all of it.
    """
    files = folder.names()
    if CONFIG_NAME not in files:
        raise SourceError(
            f"{folder}/{CONFIG_NAME}",
            "no such file, and the checkpoint itself does not describe the model",
            "copy the config.json (and tokenizer files) of the Hugging Face model into the folder",
            code="source.no-config",
        )
    config_file = folder.file(CONFIG_NAME)
    config, where = read_config(config_file), str(folder)
    shape = None if is_sized_by_files(config, str(config_file), description) else model_shape(config, str(config_file))
    saved = read_metadata(folder)
    weights = _weights(saved.tensors, where)
    whole = _read_whole(folder, weights, config)
    dropped = drop_tensors(whole, drop, shape)
    shape = shape or model_shape(config, str(config_file), stored_in(whole, where), description)
    whole = under_fqns(whole, shape)
    shape = without_absent(shape, whole)
    check_coverage(whole, shape, where, frozenset(dropped))
    ordered = {fqn: whole[fqn] for fqn in (*shape.tensors, *whole) if fqn in whole}
    data = [name for name in files if name.endswith(DATA_SUFFIX)]
    shards = _recorded(list(ordered.values()))
    taken = {tensor.name for tensor in weights.values()}
    left_out = {str(tensor.keys[0]) for tensor in saved.tensors if tensor.name not in taken} | saved.others
    return Checkpoint(
        shape=shape,
        tensors=ordered,
        auxiliary=auxiliary_files(folder, files, {METADATA_NAME, *data}),
        record=SourceRecord(shards=shards, index=index_of(shards) if len(shards) > 1 else None, dropped=dropped),
        source=Source(
            kind=folder.kind, location=folder.location, revision=folder.revision, left_out=tuple(sorted(left_out))
        ),
        originals=OriginalFiles(
            location=folder.location, revision=folder.revision, files={name: folder.file(name) for name in data}
        ),
        description=description,
        merges_slices=True,
    )


def read_dcp_weights(folder: Folder) -> dict[str, TensorAt]:
    """Return a DCP folder's weights, whole, and under Hugging Face's names if there is a config.json.

    Raises:
        SourceError, ShardError, ModelError: as `open_dcp`, but for weights that are not all of a model.
    """
    config = read_config(folder.file(CONFIG_NAME)) if CONFIG_NAME in folder.names() else None
    return _read_whole(folder, _weights(read_metadata(folder).tensors, str(folder)), config)


def read_dcp_tensors(folder: Folder) -> dict[str, TensorAt]:
    """Return all tensors of a DCP folder, optimizer state included, whole, under the names in its metadata."""
    return _read_whole(folder, {tensor.name: tensor for tensor in read_metadata(folder).tensors}, None)


def _read_whole(
    folder: Folder, weights: Mapping[str, DcpTensor], config: Mapping[str, object] | None
) -> dict[str, TensorAt]:
    tensors = _read_tensors(folder, weights)
    if config is not None and has_torchtitan_names(tensors):
        tensors = under_huggingface_names(tensors, config, str(folder))
    return {name: merge_slices(parts) for name, parts in join_slices(_flat(tensors)).items()}


def _weights(saved: Iterable[DcpTensor], where: str) -> dict[str, DcpTensor]:
    """Return the model's tensors under their names: those under `model`, or else those at the top."""
    saved = tuple(saved)
    nested = [tensor for tensor in saved if len(tensor.keys) == 2 and tensor.keys[0] == _MODEL_KEY]
    found = nested or [tensor for tensor in saved if len(tensor.keys) == 1]
    if not found:
        raise SourceError(
            f"{where}/{METADATA_NAME}",
            f"found no tensors at the top of the state dict, nor under {_MODEL_KEY!r}",
            "save the model's state dict at the top, or under that key",
            code="source.no-shards",
        )
    weights: dict[str, DcpTensor] = {}
    for tensor in found:
        name = str(tensor.keys[-1])
        if name in weights:
            problem = "two entries of the state dict have this name"
            raise SourceError(f"{where}/{METADATA_NAME}: {name!r}", problem, code="source.tensor-twice")
        weights[name] = tensor
    return weights


def _read_tensors(folder: Folder, weights: Mapping[str, DcpTensor]) -> dict[str, tuple[TensorAt, ...]]:
    """Return the chunks of each tensor."""
    return {
        name: tuple(replace(read_chunk(folder, tensor, chunk), name=name) for chunk in tensor.chunks)
        for name, tensor in weights.items()
    }


def _flat(tensors: Mapping[str, tuple[TensorAt, ...]]) -> Iterator[TensorAt]:
    for parts in tensors.values():
        yield from parts


def _recorded(tensors: Sequence[TensorAt]) -> tuple[RecordedShard, ...]:
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
