"""A folder of torch.distributed.checkpoint (DCP), such as torchtitan's `step-1000`, with the model's config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

from manifests.errors import SourceError
from manifests.models import ModelShape, is_sized_by_files, model_shape
from manifests.models.config import CONFIG_NAME
from manifests.schema import Holds, Source
from reshard.archives.dcp import DcpMetadata, DcpTensor, DcpValue, read_chunks, read_metadata
from reshard.archives.names import DATA_SUFFIX, METADATA_NAME
from reshard.formats.dcp.torchtitan import has_torchtitan_names, is_without_place, under_huggingface_names
from reshard.formats.dcp.training import OPTIMIZER, SavedOptimizer, find_optimizer, training_state
from reshard.formats.huggingface.read import auxiliary_files
from reshard.formats.huggingface.torch_files import index_of, recorded_anew
from reshard.formats.table import ListedTensor, Listing, OpenOptions
from reshard.tensors.checkpoint import Checkpoint, OriginalFiles
from reshard.tensors.comparison import check_coverage, drop_tensors, stored_in, trained_part, under_fqns, without_absent
from reshard.tensors.slices import merge_slices
from reshard.tensors.source_index import SourceRecord
from stores.base import Folder, read_config
from stores.bundles import TensorAt, join_slices

_NUMBER = re.compile(r"\.\d+\.")  # of a layer: what is left out of all layers is one line
_MODEL_KEY = "model"  # of a nested state dict: {"model": model.state_dict(), "optimizer": ...}


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Read a DCP folder's metadata and check that its weights cover the model exactly, and optimizer state if any.

    Weights have Hugging Face's names or torchtitan's, at the top of the state dict that was saved or under `model`.
    They are packed whole, however they were sharded. AdamW's state is under `optimizer`, which may be dropped.

    Raises:
        SourceError: no config.json, damaged files, or tensors missing, unknown or of the wrong shape.
        ModelError: an invalid config, an unsupported architecture, or a description of another model.
        ShardError: the chunks of a tensor are not all of it.
    """
    files, drop, description = folder.names(), options.drop, options.description
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
    stored = _Stored(folder, config if has_torchtitan_names(weights) else None)
    weights = stored.with_place(weights)
    whole: MutableMapping[str, TensorAt] = stored.tensors(weights)
    dropped = drop_tensors(whole, drop - {OPTIMIZER}, shape)
    shape = shape or model_shape(config, str(config_file), stored_in(whole, where), description)
    whole = under_fqns(whole, shape)
    shape = without_absent(shape, whole)
    check_coverage(whole, shape, where, frozenset(dropped))
    ordered = {fqn: whole[fqn] for fqn in (*shape.tensors, *whole) if fqn in whole}
    optimizer = None if OPTIMIZER in drop else find_optimizer(folder, saved, partial(stored.parameters, weights, shape))
    moments: dict[Holds, dict[str, TensorAt]] = {}
    for holds, parameters in optimizer.moments.items() if optimizer else ():
        found = under_fqns(stored.tensors(parameters), shape)
        found = {fqn: found[fqn] for fqn in (*ordered, *found) if fqn in found and fqn not in dropped}
        check_coverage(found, trained_part(shape), f"{where}: {holds}", frozenset(dropped))
        moments[holds] = found
    trained = None
    if optimizer is not None:
        dtypes = {ordered[fqn].dtype for found in moments.values() for fqn in found}
        trained = training_state(
            folder, saved, optimizer, dtypes, lambda name, tensor: map(shape.fqn_of, stored.fqns_of(name, tensor))
        )
    shards = recorded_anew(list(ordered.values()))
    data = [name for name in files if name.endswith(DATA_SUFFIX)]
    return Checkpoint(
        shape=shape,
        tensors=ordered,
        auxiliary=auxiliary_files(folder, files, {METADATA_NAME, *data}),
        record=SourceRecord(shards=shards, index=index_of(shards) if len(shards) > 1 else None, dropped=dropped),
        source=Source(
            kind=folder.kind,
            location=folder.location,
            revision=folder.revision,
            left_out=_left_out(saved, weights.values(), optimizer),
        ),
        originals=OriginalFiles(
            location=folder.location, revision=folder.revision, files={name: folder.file(name) for name in data}
        ),
        moments=moments,
        trained=trained,
        description=description,
        merges_slices=True,
    )


def read_weights(folder: Folder) -> dict[str, TensorAt]:
    """Return a DCP folder's weights, whole, and under Hugging Face's names if there is a config.json.

    Raises:
        SourceError, ShardError, ModelError: as `open_checkpoint`, but for weights that are not all of a model.
    """
    config = read_config(folder.file(CONFIG_NAME)) if CONFIG_NAME in folder.names() else None
    weights = _weights(read_metadata(folder).tensors, str(folder))
    stored = _Stored(folder, config if has_torchtitan_names(weights) else None)
    return stored.tensors(stored.with_place(weights))


def read_stored(folder: Folder) -> dict[str, TensorAt]:
    """Return all tensors of a DCP folder, optimizer state included, whole, under the names in its metadata."""
    return _Stored(folder, None).tensors({tensor.name: tensor for tensor in read_metadata(folder).tensors})


def list_tensors(folder: Folder) -> Listing:
    """Return the tensors in a DCP folder's metadata, by the part of the state dict that they are in."""
    saved = read_metadata(folder)
    tensors = tuple(
        ListedTensor(
            name=tensor.name,
            part=_MODEL_KEY if len(tensor.keys) == 1 else str(tensor.keys[0]),
            dtype=tensor.dtype,
            shape=tensor.chunks[0].region.whole_shape,
            num_chunks=len(tensor.chunks),
        )
        for tensor in saved.tensors
    )
    return Listing(
        format="dcp",
        title="torch.distributed.checkpoint",
        num_files=len({chunk.path for tensor in saved.tensors for chunk in tensor.chunks}),
        tensors=tensors,
        others=tuple(sorted({str(value.keys[0]) for value in saved.values.values()})),
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """The folder, and the config if its tensors have torchtitan's names."""

    folder: Folder
    config: Mapping[str, object] | None

    def tensors(self, saved: Mapping[str, DcpTensor]) -> dict[str, TensorAt]:
        """Return whole tensors under Hugging Face's names."""
        slices = join_slices(chunk for chunks in read_chunks(self.folder, saved).values() for chunk in chunks)
        if self.config is not None:
            slices = under_huggingface_names(slices, self.config, str(self.folder))
        return {name: merge_slices(parts) for name, parts in slices.items()}

    def with_place(self, weights: dict[str, DcpTensor]) -> dict[str, DcpTensor]:
        """Return the weights for which Hugging Face's model has a place."""
        if (config := self.config) is None:
            return weights
        return {name: weights[name] for name in weights if not is_without_place(name, config, str(self.folder))}

    def fqns_of(self, name: str, tensor: DcpTensor) -> Iterable[str]:
        return self.tensors({name: tensor})

    def parameters(self, weights: Mapping[str, DcpTensor], shape: ModelShape) -> list[str]:
        """Return the weights that are trained, in the order in which they were saved; tied ones once."""
        trained = trained_part(shape).tensors.keys() - {fqn for group in shape.ties for fqn in group[1:]}
        fqns = {name: map(shape.fqn_of, self.fqns_of(name, weights[name])) for name in weights}
        return [name for name in weights if trained.issuperset(fqns[name])]


def _left_out(saved: DcpMetadata, weights: Iterable[DcpTensor], optimizer: SavedOptimizer | None) -> tuple[str, ...]:
    """Return the top-level keys of the state dict of which something is not packed."""
    taken = {tensor.name for tensor in weights} | (set() if optimizer is None else optimizer.names)
    entries: list[DcpTensor | DcpValue] = [*saved.tensors, *saved.values.values()]
    return tuple(sorted({_NUMBER.sub(".*.", str(entry.keys[0])) for entry in entries if entry.name not in taken}))


def _weights(saved: Sequence[DcpTensor], where: str) -> dict[str, DcpTensor]:
    """Return the model's tensors under their names: those under `model`, or else those at the top."""
    nested = [tensor for tensor in saved if len(tensor.keys) == 2 and tensor.keys[0] == _MODEL_KEY]
    tensors = nested or [tensor for tensor in saved if len(tensor.keys) == 1]
    if not tensors:
        raise SourceError(
            f"{where}/{METADATA_NAME}",
            f"found no tensors at the top of the state dict, nor under {_MODEL_KEY!r}",
            "save the model's state dict at the top, or under that key",
            code="source.no-shards",
        )
    weights: dict[str, DcpTensor] = {}
    for tensor in tensors:
        name = str(tensor.keys[-1])
        if name in weights:
            problem = "two entries of the state dict have this name"
            raise SourceError(f"{where}/{METADATA_NAME}: {name!r}", problem, code="source.tensor-twice")
        weights[name] = tensor
    return weights
