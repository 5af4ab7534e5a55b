"""A checkpoint as its headers describe it: the location of each tensor, and auxiliary files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from manifests.brief import brief
from manifests.digest import PREFIX
from manifests.errors import CheckpointError, ShardError
from manifests.models import ModelShape
from manifests.models.config import CONFIG_NAME
from manifests.optimizer_state import EMA
from manifests.schema import Holds, Manifest, ModelDescription, Parent, Source, TrainingState
from reshard.tensors.source_index import SourceRecord
from stores.base import InputFile, read_config
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
    steps: Mapping[str, int] = field(default_factory=dict)  # of parameters, where it is not `trained.step`
    merges_slices: bool = False  # whether sliced tensors are packed whole
    description: ModelDescription | None = None  # of a model whose architecture does not say its modules
    untied: tuple[tuple[str, ...], ...] = ()  # what config.json or the class ties, of different values: two weights
    says_tied: bool = False  # whether config.json of a source itself ties them

    __repr__ = brief

    @property
    def location(self) -> str:
        """Its location; `source` says where its weights came from originally."""
        return self.parents[-1].location if self.manifest else self.source.location

    @property
    def state(self) -> list[TensorAt]:
        """The tensors of all kinds of optimizer state."""
        return [tensor for kind in self.moments.values() for tensor in kind.values()]

    @property
    def misread(self) -> tuple[tuple[str, ...], ...]:
        """The weights that readers which go by config.json take for one."""
        return self.untied if self.says_tied else ()

    @property
    def config_at(self) -> AuxiliaryAt:
        """Its config.json, which all have but a source that is a config alone."""
        return next(item for item in self.auxiliary if item.path == CONFIG_NAME)

    def read_config(self) -> dict[str, Any]:
        return read_config(self.config_at.file, self.config_at.digest)


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
