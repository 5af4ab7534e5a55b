"""The manifest's types, version 1. SPEC.md says what each field means; field names are the JSON keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manifests.placement import Placement, Style

__all__ = [
    "FORMAT",
    "VERSION",
    "CarriedFile",
    "Layout",
    "Manifest",
    "Model",
    "Parent",
    "Shard",
    "Source",
    "Stage",
    "TieGroup",
    "TieMember",
    "TrainingState",
]

FORMAT = "reshard-manifest"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file of a bundle. `nbytes` is the file's size; see `Header.digest`."""

    path: str  # below the manifest's folder, "/" between its parts
    nbytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A contiguous piece of the model and the bundle that holds its tensors (`nbytes` of data)."""

    index: int
    rank: int
    virtual: int
    modules: tuple[str, ...]
    num_tensors: int
    num_params: int
    nbytes: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TieMember:
    """One name of a tied parameter, on the stage that uses it."""

    fqn: str
    stage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TieGroup:
    """FQNs naming one parameter, such as the input embedding and the LM head."""

    owner: TieMember  # the copy that export writes
    replicas: tuple[TieMember, ...]  # at least one; may sit on other stages

    @property
    def members(self) -> tuple[TieMember, ...]:
        return (self.owner, *self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout as it was asked for, and the placement that came of it."""

    spec: str
    style: Style
    num_stages: int
    num_ranks: int
    num_virtual: int
    schedule: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    architecture: str
    num_layers: int
    num_params: int  # a tied parameter counts once


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the weights came from. `left_out` names files of the source that were not carried."""

    kind: str
    location: str
    revision: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """A manifest that this one was made from: where it was, and the digest of its manifest.json."""

    location: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedFile:
    """A small file of the source (config, tokenizer), kept byte for byte."""

    path: str
    nbytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """How far the weights were trained: optimizer steps, and tokens that counted in the loss."""

    step: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What was written: every bundle, where its stage runs, and where it all came from."""

    created_by: str
    model: Model
    source: Source
    layout: Layout
    stages: tuple[Stage, ...]
    ties: tuple[TieGroup, ...] = ()
    files: tuple[CarriedFile, ...] = ()
    parents: tuple[Parent, ...] = ()
    training: TrainingState | None = None

    @property
    def placement(self) -> Placement:
        return Placement(num_stages=self.layout.num_stages, num_ranks=self.layout.num_ranks, style=self.layout.style)

    @property
    def shards(self) -> Iterator[Shard]:
        return (shard for stage in self.stages for shard in stage.shards)
