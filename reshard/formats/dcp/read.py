"""A folder of torch.distributed.checkpoint (DCP), such as torchtitan's `step-1000`, with the model's config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from manifests.errors import InputError, SourceError, UnreachableError
from manifests.models import ModelShape, tensor_names
from manifests.models.config import CONFIG_NAME
from manifests.optimizer_state import kinds_of, state_shapes
from manifests.slices import Slice, problem_with_slices
from manifests.trained import STEPS_NAME, encode_steps
from reshard.archives.dcp import (
    AGAIN,
    DcpMetadata,
    DcpTensor,
    DcpValue,
    Item,
    Place,
    read_chunks,
    read_index,
    read_metadata,
)
from reshard.archives.names import DATA_SUFFIX, METADATA_NAME
from reshard.formats.assemble import (
    OF_OPTIMIZER,
    OPTIMIZER,
    ModelTensors,
    bad_optimizer,
    config_in,
    read_model_config,
)
from reshard.formats.auxiliary import auxiliary_files
from reshard.formats.dcp.torchtitan import (
    Copies,
    has_torchtitan_names,
    is_without_place,
    mtp_copies,
    under_huggingface_names,
)
from reshard.formats.dcp.training import SavedOptimizer, find_optimizer, training_state
from reshard.formats.table import CheckOptions, ListedTensor, Listing, OpenOptions
from reshard.formatting import count_of, some
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.comparison import Contents, Findings
from reshard.tensors.lazy import MemoryFile
from reshard.tensors.slices import Slices, indices_of, merge_slices, rows_of
from stores.base import Folder, read_config
from stores.bundles import TensorAt, join_slices

_NUMBER = re.compile(r"\.\d+\.")  # of a layer: what is left out of all layers is one line
_MODEL_KEY = "model"  # of a nested state dict: {"model": model.state_dict(), "optimizer": ...}
# Experts that transformers' models stack in one tensor in memory, (experts, 2 F, D) and (experts, D, F), unlike files.
# Source: transformers 5.23, `conversion_mapping.py`, the entries of qwen2_moe and mixtral, which others refer to.
# That a config does not say which tensors a folder has, or that it has none of a model.
_UNCOMPARED = ("config.unsupported-architecture", "model.unknown-torchtitan-layout", "source.no-shards")
_STACKED = re.compile(r"^(.+\.experts)\.(gate_up_proj|down_proj)$")
_MATRICES: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
)


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Read a DCP folder's metadata and check that its weights cover the model exactly, and optimizer state if any.

    Weights have Hugging Face's names or torchtitan's, at the top of the state dict that was saved or under `model`.
    They are packed whole, however they were sharded. Optimizer state is under `optimizer`, which may be dropped.
    """
    config, where = read_model_config(config_in(folder), options.description), str(folder)
    saved = read_metadata(folder)
    weights = _weights(saved.tensors, where)
    stored = _Stored.of(folder, config.fields, weights)
    weights = stored.with_place(weights)
    model = ModelTensors.cover(stored.tensors(weights), config, options, where)
    model = replace(model, weights=_stored_once(model.weights, model.shape))
    optimizer = None
    if OPTIMIZER not in options.drop:
        optimizer = find_optimizer(folder, saved, partial(stored.parameters, weights, model.shape))
    files = folder.names()
    data = [name for name in files if name.endswith(DATA_SUFFIX)]
    auxiliary = auxiliary_files(folder, files, {METADATA_NAME, *data})
    checkpoint = model.checkpoint(folder, data, auxiliary, _left_out(saved, weights.values(), optimizer))
    if optimizer is None:
        return checkpoint
    trained = training_state(
        folder, saved, optimizer, model.weights, lambda name, of: map(model.fqn_of, stored.fqns_of(name, of))
    )
    assert trained.optimizer is not None
    moments, (groups, kinds) = {}, (trained.optimizer.groups, kinds_of(trained.optimizer))
    for kind in kinds:
        if kind.shape != "parameter" and stored.config is not None:
            raise bad_optimizer(where, f"found {kind.name!r}, which no optimizer of torchtitan has")
        shapes = state_shapes(kind, groups, model.shape.trained, model.shape.ties)
        moments[kind.name] = model.cover_state(kind.name, stored.tensors(optimizer.moments[kind.name]), shapes)
    state = {name: tensor for of_kind in optimizer.moments.values() for name, tensor in of_kind.items()}
    fqns = {name: map(model.fqn_of, stored.fqns_of(name, state[name])) for name in optimizer.differing}
    if fqns:
        steps = {fqn: optimizer.differing[name] for name, of_name in fqns.items() for fqn in of_name}
        file = MemoryFile(STEPS_NAME, encode_steps(steps))
        checkpoint = replace(checkpoint, auxiliary=(*checkpoint.auxiliary, AuxiliaryAt(path=STEPS_NAME, file=file)))
    return replace(checkpoint, moments=moments, trained=trained)


def read_weights(folder: Folder) -> dict[str, TensorAt]:
    """Return a DCP folder's weights, whole, and under Hugging Face's names if there is a config.json."""
    config = read_config(folder.file(CONFIG_NAME)) if CONFIG_NAME in folder.names() else None
    weights = _weights(read_metadata(folder).tensors, str(folder))
    stored = _Stored.of(folder, config, weights)
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
    """The folder, and the config if its tensors have torchtitan's names, of which MTP layers share some."""

    folder: Folder
    config: Mapping[str, object] | None
    copies: Copies = field(default_factory=dict)
    is_in_files: Callable[[str], bool] | None = None  # if experts are stacked, as in transformers' model in memory

    @classmethod
    def of(cls, folder: Folder, config: Mapping[str, object] | None, weights: Collection[str]) -> _Stored:
        if config is None:
            return cls(folder, None)
        if not has_torchtitan_names(weights):
            are_stacked = any(map(_STACKED.match, weights))
            return cls(folder, None, is_in_files=tensor_names(config, str(folder)) if are_stacked else None)
        return cls(folder, config, mtp_copies(weights, config))

    def tensors(self, saved: Mapping[str, DcpTensor]) -> dict[str, TensorAt]:
        """Return whole tensors under Hugging Face's names."""
        slices = join_slices(chunk for chunks in read_chunks(self.folder, saved).values() for chunk in chunks)
        if self.config is not None:
            slices = under_huggingface_names(slices, self.config, str(self.folder), self.copies)
        elif self.is_in_files is not None:
            slices = _under_names_in_files(slices, self.is_in_files)
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
        trained = shape.trained.keys() - {fqn for group in shape.ties for fqn in group[1:]}
        fqns = {name: map(shape.fqn_of, self.fqns_of(name, weights[name])) for name in weights}
        return [name for name in weights if not trained.isdisjoint(fqns[name])]  # copies of some may be dropped


def _under_names_in_files(tensors: Mapping[str, Slices], is_in_files: Callable[[str], bool]) -> dict[str, Slices]:
    """Return the slices of each tensor under its names in files, of which a stack of experts has many."""
    return {
        new: tuple(replace(part, name=new) for part in slices_of)
        for name, slices in tensors.items()
        for new, slices_of in _in_files(name, slices, is_in_files)
    }


def _in_files(name: str, slices: Slices, is_in_files: Callable[[str], bool]) -> Iterator[tuple[str, Slices]]:
    for other in (name, name.replace(".mlp.", ".block_sparse_moe.")):
        if is_in_files(other):
            yield other, slices
            return
        stack = _STACKED.match(other)
        if stack is None or len(slices[0].whole_shape) != 3:
            continue
        for matrices in _MATRICES:
            leaves = matrices[stack[2]]
            if is_in_files(f"{stack[1]}.0.{leaves[0]}.weight"):
                rows, rest = divmod(slices[0].whole_shape[1], len(leaves))
                if rest:  # state that is reduced over both matrices, such as the `col_var` of Adafactor
                    problem = f"expected rows of {' and '.join(leaves)}, found {list(slices[0].whole_shape)} for both"
                    raise bad_optimizer(slices[0].place, problem)
                for expert, of_expert in enumerate(indices_of(slices)):
                    for number, leaf in enumerate(leaves):
                        yield f"{stack[1]}.{expert}.{leaf}.weight", rows_of(of_expert, [(number * rows, rows)])
                return
    yield name, slices


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


def _stored_once(weights: Mapping[str, TensorAt], shape: ModelShape) -> dict[str, TensorAt]:
    """Return the weights without second names of tied ones in one place, which an export has."""
    owners = {fqn: group[0] for group in shape.ties for fqn in group[1:] if group[0] in weights}
    return {
        fqn: tensor
        for fqn, tensor in weights.items()
        if fqn not in owners or replace(tensor, name=owners[fqn]) != weights[owners[fqn]]
    }


def check(folder: Folder, findings: Findings, options: CheckOptions) -> Contents:
    """Report what is wrong with a folder's files, and where its weights are not those of the model in config.json."""
    contents = check_files(folder, findings, options)
    if CONFIG_NAME in folder.names() and not findings:
        try:
            weights = _weights(read_metadata(folder).tensors, str(folder))
            if any(name.endswith(".weight") for name in weights):  # a state dict may have them under any key
                open_checkpoint(folder, OpenOptions(drop=frozenset({OPTIMIZER})))
        except UnreachableError:
            raise
        except InputError as error:
            if error.code not in _UNCOMPARED:
                findings.add_error(error)
    return contents


def check_files(folder: Folder, findings: Findings, options: CheckOptions) -> Contents:
    """Report items whose files are missing or too short, and tensors whose chunks are not the whole of them."""
    index = read_index(folder)
    _report_files(folder, index.items, findings)
    _report_chunks(f"{folder}/{METADATA_NAME}", index.regions, index.items, findings)
    tensors = read_stored(folder) if options.reads_tensors and not findings else {}
    return Contents(
        num_tensors=sum(regions is not None for regions in index.regions.values()),
        num_files=len({path for path, _, _ in index.items.values()}),
        nbytes=sum(nbytes for _, _, nbytes in set(index.items.values())),
        tensors=tensors,
        state=[tensor for name, tensor in tensors.items() if OF_OPTIMIZER.match(name)],
    )


def _report_files(folder: Folder, items: Mapping[Item, Place], findings: Findings) -> None:
    """Report files that are missing, end before an item does, or have two items in one place."""
    names, places = set(folder.names()), dict[str, list[tuple[int, int, str]]]()
    for (fqn, _), (path, begin, nbytes) in items.items():
        places.setdefault(path, []).append((begin, begin + nbytes, fqn))
    for path, parts in sorted(places.items()):
        where, needed = f"{folder}/{path}", max(end for _, end, _ in parts)
        if path not in names:
            lost = [fqn for _, _, fqn in parts]
            problem = f"no such file; without it {count_of(lost, 'item')} missing: {some(lost)}"
            findings.add(where, problem, AGAIN, lost, code="check.missing-shard")
        elif (nbytes := folder.file(path).nbytes) < needed:
            lost = [fqn for _, end, fqn in parts if end > nbytes]
            problem = f"expected at least {needed} bytes ({METADATA_NAME}), found {nbytes}"
            findings.add(where, problem, AGAIN, lost, code="check.truncated-file")
        ranges = sorted({(begin, end) for begin, end, _ in parts})  # entries with the same value may share its bytes
        if any(end > begin for (_, end), (begin, _) in pairwise(ranges)):
            problem = "two items overlap in this file"
            findings.add(where, problem, AGAIN, code="check.overlapping-items")


def _report_chunks(
    where: str, chunks: Mapping[str, tuple[Slice, ...] | None], items: Mapping[Item, object], findings: Findings
) -> None:
    """Report tensors whose chunks do not cover them, and chunks and entries that are stored nowhere."""
    entries = {fqn for fqn, _ in items}
    for fqn, slices in chunks.items():
        place = f"{where}: {fqn!r}"
        if slices is None:
            if fqn not in entries:
                findings.add(place, "is stored in no file", AGAIN, code="check.absent-item")
            continue
        absent = [part for part in slices if (fqn, str(part.offset)) not in items]
        if absent:
            problem = f"{len(absent)} of its {len(slices)} chunks are stored in no file"
            findings.add(place, problem, AGAIN, code="check.absent-item")
        if incomplete := _problem_with_chunks(slices):
            findings.add(place, incomplete, AGAIN, code="check.uncovered-tensor")


def _problem_with_chunks(chunks: Sequence[Slice]) -> str | None:
    """Return why these chunks, which may be of any shape, are not the whole tensor; None if they are."""
    if not chunks:
        return "has no chunks"
    for part in chunks:
        if len(part.offset) != len(part.whole_shape) or len(part.shape) != len(part.whole_shape):
            sizes = f"{list(part.offset)} and {list(part.shape)}"
            return f"expected a chunk's offsets and sizes in {len(part.whole_shape)} dimensions, found {sizes}"
    return problem_with_slices(chunks)
