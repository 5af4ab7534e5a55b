"""export: from bundles to a folder of torch.distributed.checkpoint, as torchtitan's trainer resumes from.

Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py and filesystem.py; torchtitan 0.3.0, components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from struct import pack

from manifests.schema import MOMENTS
from reshard.archives.names import DATA_SUFFIX, METADATA_NAME
from reshard.archives.pickling import Call, Instance, Name, pickled
from reshard.archives.saved import SavedTensor, saved_value, torch_dtype
from reshard.copy.engine import WriteOptions
from reshard.operations.export import ExportResult
from reshard.operations.exported_optimizer import adamw_options
from reshard.operations.publish_export import ExportPlan, check_export_to, publish_export
from reshard.plans.pack_plan import OutputShard, without_header
from reshard.sources.huggingface import CONFIG_NAME
from reshard.tensors.checkpoint import Checkpoint, TensorAt
from reshard.tensors.lazy import Buffer, DerivedFile, MemoryFile, read_blocks
from reshard.transforms.cast import ExportDtype, cast_checkpoint, casts_in
from reshard.transforms.torchtitan import Placed, TitanModel, in_place
from stores.base import read_config
from stores.manifest_file import Address

__all__ = ["export_dcp"]

_MAX_FILE_NBYTES = 5 << 30
_METADATA = "torch.distributed.checkpoint.metadata"
_OPTIMIZER, _STATE, _GROUPS = "optimizer", "state", "param_groups"
# Of torch's AdamW, with torchtitan's defaults.
_GROUP_DEFAULTS: Mapping[str, object] = {
    "amsgrad": False, "maximize": False, "foreach": False, "capturable": False, "differentiable": False, "fused": True,
    "decoupled_weight_decay": True,
}  # fmt: skip
_STEP = SavedTensor("F32", ())


def export_dcp(
    checkpoint: Checkpoint,
    out: Address,
    *,
    force: bool,
    for_torchtitan: bool,
    weights_only: bool = False,
    dtype: ExportDtype = "source",
    options: WriteOptions | None = None,
) -> ExportResult:
    """Write a DCP folder: weights, and AdamW's state and how far they were trained if the checkpoint has them.

    Names are Hugging Face's, or torchtitan's. Weights are as the manifest has them unless `dtype` says otherwise.

    Raises:
        OutputError: `out` exists, cannot be written, or is where the model came from.
        ShardError: a bundle's bytes do not match their digests.
        ModelError: torchtitan has no such model, or no such tensor.
        CheckpointError: the optimizer state lacks what torchtitan requires.
        UserError: see `cast_checkpoint` and `check_export_to`.
    """
    check_export_to(out, checkpoint, force=force)
    if weights_only:
        checkpoint = replace(checkpoint, trained=None)
    if dtype != "source":
        checkpoint = cast_checkpoint(checkpoint, dtype)
    saved = _save(checkpoint, for_torchtitan)
    plan = ExportPlan(
        copied=checkpoint.auxiliary,
        shards=saved.files.shards,
        last=METADATA_NAME,  # torch and torchtitan refuse a folder without it
        last_bytes=saved.metadata,
    )
    return ExportResult(
        num_files=publish_export(out, plan, options or WriteOptions(), force=force),
        nbytes=sum(shard.nbytes for shard in plan.shards),
        identical=False,
        casts=casts_in(checkpoint) if dtype != "source" else {},
    )


@dataclass(frozen=True, slots=True)
class _At:
    path: str
    begin: int
    nbytes: int


class _Files:
    """The `.distcp` files: items follow each other, in files of at most 5 GiB, or of one item."""

    def __init__(self) -> None:
        self._contents: list[list[TensorAt]] = []
        self._nbytes = _MAX_FILE_NBYTES

    def add(self, item: TensorAt) -> _At:
        if self._nbytes + item.nbytes > _MAX_FILE_NBYTES:
            self._contents.append([])
            self._nbytes = 0
        self._contents[-1].append(item)
        self._nbytes += item.nbytes
        return _At(self._path(len(self._contents) - 1), self._nbytes - item.nbytes, item.nbytes)

    @property
    def shards(self) -> tuple[OutputShard, ...]:
        return tuple(without_header(self._path(number), items) for number, items in enumerate(self._contents))

    def _path(self, number: int) -> str:
        return f"__0_{number}{DATA_SUFFIX}"


@dataclass(slots=True)
class _Tensor:
    """An entry of the state dict: chunks of one shape, each stored as a file of torch.save."""

    dtype: str
    whole_shape: tuple[int, ...]
    chunks: dict[tuple[int, ...], tuple[tuple[int, ...], _At]] = field(default_factory=dict)  # by offset


class _Saved:
    """The state dict: where each entry is stored. Several may be stored in one place."""

    def __init__(self) -> None:
        self.files = _Files()
        self._tensors: dict[tuple[str, ...], _Tensor] = {}  # by their keys in nested dicts
        self._values: dict[tuple[str, ...], _At] = {}
        self._written: dict[bytes, _At] = {}

    def add(self, placed: Placed, keys: Callable[[str], tuple[str, ...]]) -> None:
        """Store a tensor; `keys` makes the key of a model's state dict that of the whole one."""
        tensor, count = placed.tensor, len(placed.places[0].offsets)
        saved = SavedTensor(tensor.dtype, placed.chunk_shape)
        nbytes = saved.nbytes * count
        file = DerivedFile("as torch.save writes it", (tensor,), nbytes, partial(_blocks, tensor, saved, count))
        name = ".".join(keys(placed.places[0].key))
        begin = self.files.add(TensorAt(f"{name}.{placed.places[0].offsets[0]}", "U8", (nbytes,), file, 0, nbytes))
        for place in placed.places:
            entry = self._tensors.setdefault(keys(place.key), _Tensor(tensor.dtype, place.whole_shape))
            for number, offset in enumerate(place.offsets):
                at = _At(begin.path, begin.begin + number * saved.nbytes, saved.nbytes)
                entry.chunks[offset] = (placed.chunk_shape, at)

    def add_step(self, keys: tuple[str, ...], step: int) -> None:
        """Store the number of steps that a parameter took, in a tensor as torch's optimizers have it."""
        at = self._write(b"".join(map(bytes, _STEP.blocks(iter((pack("<f", step),))))))
        self._tensors[keys] = _Tensor(_STEP.dtype, (), {(): ((), at)})

    def add_value(self, keys: tuple[str, ...], value: object) -> None:
        self._values[keys] = self._write(saved_value(value))

    def _write(self, data: bytes) -> _At:
        if data not in self._written:
            item = TensorAt(
                f"value {len(self._written)}", "U8", (len(data),), MemoryFile("a value", data), 0, len(data)
            )
            self._written[data] = self.files.add(item)
        return self._written[data]

    @property
    def parameters(self) -> list[str]:
        """The parameters that have optimizer state."""
        suffix = f".{MOMENTS[0]}"
        return [
            keys[1].removeprefix(f"{_STATE}.").removesuffix(suffix)
            for keys in self._tensors
            if keys[0] == _OPTIMIZER and keys[-1].endswith(suffix)
        ]

    def metadata(self) -> bytes:
        """Return `.metadata`: a pickle of torch's classes, by name."""
        entries: dict[str, object] = {".".join(keys): _entry(tensor) for keys, tensor in self._tensors.items()}
        entries |= {".".join(keys): Instance(Name(_METADATA, "BytesStorageMetadata")) for keys in self._values}
        stored: dict[object, object] = {}
        for keys, tensor in self._tensors.items():
            for offset, (_, at) in tensor.chunks.items():
                stored[_index(".".join(keys), _size(offset))] = _info(at)
        stored |= {_index(".".join(keys), None): _info(at) for keys, at in self._values.items()}
        state = {
            "state_dict_metadata": entries,
            "planner_data": {".".join(keys): keys for keys in (*self._tensors, *self._values)},
            "storage_data": stored,
            "storage_meta": None,
            "version": "1.0.0",
        }
        return pickled(Instance(Name(_METADATA, "Metadata"), state))


def _save(checkpoint: Checkpoint, for_torchtitan: bool) -> _Saved:
    saved = _Saved()
    model = _titan_model(checkpoint) if for_torchtitan else None

    def place(tensor: TensorAt, *, is_fused: bool) -> Placed:
        return model.place(tensor, is_fused=is_fused) if model else in_place(tensor, tensor.name)

    for fqn, tensor in _with_ties(checkpoint, for_torchtitan):
        if not fqn.endswith(checkpoint.shape.ignored_suffixes or ("\0",)):
            saved.add(place(tensor, is_fused=False), lambda key: (key,))
    for placed in model.balances(checkpoint.tensors) if model else ():
        saved.add(placed, lambda key: (key,))
    trained = checkpoint.trained
    if trained is None or trained.optimizer is None:
        return saved
    tied = {fqn for group in checkpoint.shape.ties for fqn in group}
    owners = {next(fqn for fqn in group if fqn in checkpoint.tensors) for group in checkpoint.shape.ties}
    for holds in MOMENTS:
        for fqn, tensor in checkpoint.moments[holds].items():
            if fqn not in tied or fqn in owners:
                keys = partial(_state_key, kind=holds)
                saved.add(place(tensor, is_fused=True), keys)
    options = {**adamw_options(checkpoint, trained, trained.optimizer), **_GROUP_DEFAULTS}
    for key in saved.parameters:
        saved.add_step(_state_key(key, "step"), trained.step)
        for option, value in options.items():
            saved.add_value((_OPTIMIZER, f"{_GROUPS}.{key}.{option}"), value)
    saved.add_value(("train_state", "step"), trained.step)
    saved.add_value(("train_state", "ntokens_seen"), trained.num_tokens)
    saved.add_value(("lr_scheduler", "last_epoch"), trained.step)
    return saved


def _state_key(key: str, kind: str) -> tuple[str, str]:
    return _OPTIMIZER, f"{_STATE}.{key}.{kind}"


def _titan_model(checkpoint: Checkpoint) -> TitanModel:
    item = next(item for item in checkpoint.auxiliary if item.path == CONFIG_NAME)
    return TitanModel(read_config(item.file, item.digest), checkpoint.shape.tensors, checkpoint.location)


def _with_ties(checkpoint: Checkpoint, for_torchtitan: bool) -> Iterator[tuple[str, TensorAt]]:
    """Yield the weights; torchtitan's state dicts have a tied one under each of its names."""
    yield from checkpoint.tensors.items()
    for group in checkpoint.shape.ties if for_torchtitan else ():
        owner = next(checkpoint.tensors[fqn] for fqn in group if fqn in checkpoint.tensors)
        yield from ((fqn, replace(owner, name=fqn)) for fqn in group if fqn not in checkpoint.tensors)


def _blocks(tensor: TensorAt, saved: SavedTensor, count: int) -> Iterator[Buffer]:
    """Yield the files of a tensor's chunks, each of `count` equal parts of its rows."""
    data = _Rows(read_blocks(tensor))
    for _ in range(count):
        yield from saved.blocks(data.take(saved.data_nbytes))
    data.end()


class _Rows:
    """Bytes of a tensor, taken in parts."""

    def __init__(self, blocks: Iterator[memoryview]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def take(self, nbytes: int) -> Iterator[memoryview]:
        while nbytes:
            if not self._rest:
                self._rest = next(self._blocks)
            part, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(part)
            yield part

    def end(self) -> None:
        """Let the reader compare the digest of what was read."""
        assert next(self._blocks, None) is None, "more bytes than planned"


def _size(sizes: Sequence[int]) -> Call:
    return Call(Name("torch", "Size"), (tuple(sizes),))


def _entry(tensor: _Tensor) -> Instance:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = Instance(
        Name(_METADATA, "TensorProperties"), (torch_dtype(tensor.dtype), layout, False, contiguous, False)
    )
    chunks = [
        Instance(Name(_METADATA, "ChunkStorageMetadata"), {"offsets": _size(offset), "sizes": _size(shape)})
        for offset, (shape, _) in sorted(tensor.chunks.items())
    ]
    state = {"properties": properties, "size": _size(tensor.whole_shape), "chunks": chunks}
    return Instance(Name(_METADATA, "TensorStorageMetadata"), state)


def _index(name: str, offset: Call | None) -> Instance:
    return Instance(Name(_METADATA, "MetadataIndex"), {"fqn": name, "offset": offset, "index": None})


def _info(at: _At) -> Instance:
    state = {"relative_path": at.path, "offset": at.begin, "length": at.nbytes}
    return Instance(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)
