"""A checkpoint as its headers describe it: the location of each tensor, and auxiliary files."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Literal

from manifests.brief import brief
from manifests.digest import PREFIX
from manifests.errors import CheckpointError, ShardError
from manifests.models import ModelShape
from manifests.optimizer_state import EMA
from manifests.schema import Holds, Manifest, ModelDescription, Parent, Source, TrainingState
from manifests.slices import Slice
from reshard.tensors.source_index import SourceRecord
from stores.base import InputFile
from stores.bundles import TensorAt

ExportedWeights = Literal["trained", "ema"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxiliaryAt:
    """An auxiliary file (config, tokenizer): its path in the checkpoint, and the file to read it from."""

    path: str
    file: InputFile
    digest: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginalFiles:
    location: str
    revision: str | None
    files: Mapping[str, InputFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A source as its headers describe it.

    `tensors` has each stored FQN once, with its slices merged (see `slices_of`); a tied FQN that no file stores is
    absent. `moments` has the optimizer state in the same form, by kind and by the FQN of the parameter.
    """

    shape: ModelShape
    tensors: Mapping[str, TensorAt]
    auxiliary: tuple[AuxiliaryAt, ...]
    record: SourceRecord
    source: Source
    parents: tuple[Parent, ...] = ()
    manifest: Manifest | None = None  # when the source is a manifest
    originals: OriginalFiles | None = None  # if tensors are read from them
    moments: Mapping[Holds, Mapping[str, TensorAt]] = field(default_factory=dict)  # of a training checkpoint
    trained: TrainingState | None = None
    merges_slices: bool = False  # whether sliced tensors are packed whole
    description: ModelDescription | None = None  # of a model whose architecture does not say its modules

    __repr__ = brief

    @property
    def location(self) -> str:
        """Its location; `source` says where its weights came from originally."""
        return self.parents[-1].location if self.manifest else self.source.location


def with_average(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the average of its weights in their place; what is not trained is as it is."""
    averages = checkpoint.moments.get(EMA)
    if averages is None:
        problem, hint = "has no average of the weights", "runner launch MANIFEST -- --ema DECAY keeps one"
        raise CheckpointError(checkpoint.location, problem, hint, code="checkpoint.no-optimizer-state")
    return replace(checkpoint, tensors={fqn: averages.get(fqn, at) for fqn, at in checkpoint.tensors.items()})


def check_digest(tensor: TensorAt, digest: str, expected: str | None = None) -> None:
    """Raise if a tensor's digest, or the `expected` one, is recorded and other than `digest` (hex)."""
    expected = expected or tensor.digest
    if expected is not None and digest != expected:
        raise ShardError(
            tensor.place,
            f"expected {PREFIX}{expected}, found {PREFIX}{digest}",
            "the shard was changed or damaged after it was written; pack the source again",
            code="shard.digest-mismatch",
        )


_DIGEST_NBYTES = 32
_Kind = tuple[InputFile, str, tuple[int, ...], int, Slice | None, bool]


class TensorMap(MutableMapping[str, TensorAt]):
    """Tensors by name, in columns: about 110 bytes for each beside its name, where an object takes 240.

    Objects are made on access, so that two checkpoints of a million tensors can be compared in memory.
    """

    __slots__ = ("_begins", "_digests", "_file", "_kinds", "_rows", "_shared")

    def __init__(self) -> None:
        self._rows: dict[str, int | TensorAt] = {}
        self._kinds: list[_Kind] = []  # tensors of one kind share the object
        self._begins, self._digests = array("Q"), bytearray()
        self._file: InputFile | None = None  # that `_shared` is of
        self._shared: dict[_Kind, _Kind] = {}

    def __setitem__(self, name: str, tensor: TensorAt) -> None:
        if tensor.file is not self._file:
            self._file, self._shared = tensor.file, {}
        kind = (tensor.file, tensor.dtype, tensor.shape, tensor.nbytes, tensor.part, tensor.blake3 is not None)
        self._rows[name] = len(self._kinds)
        self._kinds.append(self._shared.setdefault(kind, kind) if tensor.part is None else kind)
        self._begins.append(tensor.begin)
        if tensor.blake3 is not None:  # those before it may have none
            self._digests += bytes((len(self._kinds) - 1) * _DIGEST_NBYTES - len(self._digests)) + tensor.blake3

    def __getitem__(self, name: str) -> TensorAt:
        row = self._rows[name]
        if isinstance(row, TensorAt):
            return row
        file, dtype, shape, nbytes, part, has_digest = self._kinds[row]
        first = row * _DIGEST_NBYTES
        digest = bytes(self._digests[first : first + _DIGEST_NBYTES]) if has_digest else None
        return TensorAt(name, dtype, shape, file, self._begins[row], nbytes, digest, part)

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def renamed(self, names: Iterable[tuple[str, str]]) -> TensorMap:
        """Return the tensors under other names, as pairs of the new and the present one; the columns are shared."""
        other = TensorMap()
        other._rows = {new: self._rows[name] for new, name in names}
        other._kinds, other._begins, other._digests = self._kinds, self._begins, self._digests
        return other

    def objects(self) -> Mapping[str, TensorAt]:
        """Return every tensor as an object, which the map keeps from now on in place of its columns."""
        for name in self._rows:
            self._rows[name] = self[name]
        self._kinds, self._begins, self._digests = [], array("Q"), bytearray()
        return self


def as_objects(tensors: Mapping[str, TensorAt]) -> Mapping[str, TensorAt]:
    """Return tensors of which a plan refers to each, so that none is made twice."""
    return tensors.objects() if isinstance(tensors, TensorMap) else tensors
