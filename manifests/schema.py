"""The manifest's types, version 1. SPEC.md says what each field means; field names are the JSON keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from manifests.placement import Placement, Style

__all__ = [
    "FORMAT",
    "MOMENTS",
    "VERSION",
    "WEIGHTS",
    "AuxiliaryFile",
    "BatchSizes",
    "DataCursor",
    "DataPosition",
    "Decay",
    "Holds",
    "Layout",
    "LearningRate",
    "Manifest",
    "Model",
    "OptimizerState",
    "OriginalFile",
    "ParameterGroup",
    "Parent",
    "RandomState",
    "Shard",
    "Source",
    "SourcePosition",
    "Span",
    "Stage",
    "TieGroup",
    "TieMember",
    "TrainedDtype",
    "TrainingState",
    "Virtual",
]

FORMAT = "reshard-manifest"
VERSION = 1

Holds = Literal["weights", "exp_avg", "exp_avg_sq"]
Decay = Literal["constant", "linear", "cosine", "sqrt"]
TrainedDtype = Literal["F64", "F32", "F16", "BF16"]
WEIGHTS: Holds = "weights"
MOMENTS: tuple[Holds, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file of a bundle. `nbytes` is the file's size; see `Header.digest`."""

    path: str  # below the manifest's folder, "/" between its parts
    nbytes: int
    digest: str
    holds: Holds = WEIGHTS  # or what AdamW calls the moments, under the FQNs of their parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Bytes `begin` to `end` of file number `file` of `Virtual.files`: whole tensors, one after the other."""

    file: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A contiguous piece of the model and the bundle that holds its tensors (`nbytes` of data).

    A bundle is shards of its own or, where it is virtual, spans of the original files.
    """

    index: int
    rank: int
    virtual: int
    modules: tuple[str, ...]
    num_tensors: int
    num_params: int
    nbytes: int
    shards: tuple[Shard, ...]
    spans: tuple[Span, ...] = ()


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
class AuxiliaryFile:
    """A small file of the source (config, tokenizer), kept byte for byte."""

    path: str
    nbytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """An optimizer's options, and the parameters they are for; no FQNs: all that no other group names."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    fqns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """The optimizer whose moments the shards hold. `name` is its class in `torch.optim`."""

    name: str
    max_norm: float  # gradients were scaled down to this norm; 0: never
    groups: tuple[ParameterGroup, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """A linear warm-up to `peak`, `stable_steps` there, then `decay` to `minimum`, reached at step `decay_steps`."""

    peak: float
    warmup_steps: int
    decay: Decay
    decay_steps: int
    minimum: float
    stable_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Sequences in an optimizer step and in a microbatch, and tokens in a sequence."""

    global_batch: int
    microbatch: int
    seq_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePosition:
    """Where the documents of a source go on: `item` counts files, or what is shuffled, in the order of this pass."""

    epoch: int  # passes that are over
    item: int
    offset: int  # in the item: what of it is used up


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCursor:
    """The place in the sources at which the next sequence begins: what is before it need not be read."""

    num_documents: int  # used up, of all sources together
    num_tokens: int  # used up as well, of what comes next at the positions
    sources: tuple[SourcePosition, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """Where the data was left: sequences that all ranks together have used up."""

    num_sequences: int
    digest: str  # of what decides which sequence has which number
    cursor: DataCursor | None = None  # None: the sequences before have to be read again


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """A rank's random numbers: the state of its generator, in base64."""

    rank: int
    generator: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """How far the weights were trained, and what it takes to go on; without `optimizer`, no moments are there.

    Steps and tokens that counted in the loss are those of one run, resumed or not.
    """

    step: int
    num_tokens: int
    dtype: TrainedDtype | None = None  # of the parameters while they are trained, as in a shard's header
    compute_dtype: TrainedDtype | None = None  # of the copies of them that stages compute with; None: of no copies
    reduce_dtype: TrainedDtype | None = None  # of gradients while data-parallel ranks add them up; None: `dtype`
    optimizer: OptimizerState | None = None
    learning_rate: LearningRate | None = None
    batch: BatchSizes | None = None
    data: DataPosition | None = None
    random: tuple[RandomState, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginalFile:
    """A weight file of the source as it stood when the manifest was written, and must still stand."""

    path: str  # below the location
    nbytes: int
    pin: str  # see `stores.base.InputFile.fingerprint`
    digest: str  # of its header, see `Header.digest`


@dataclass(frozen=True, kw_only=True, slots=True)
class Virtual:
    """The original files that virtual bundles refer to, and the folder they are in."""

    location: str  # an absolute path or a URL, without the revision
    files: tuple[OriginalFile, ...]
    revision: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What was written: every bundle, where its stage runs, and where it all came from."""

    created_by: str
    model: Model
    source: Source
    layout: Layout
    stages: tuple[Stage, ...]
    ties: tuple[TieGroup, ...] = ()
    files: tuple[AuxiliaryFile, ...] = ()
    parents: tuple[Parent, ...] = ()
    training: TrainingState | None = None
    virtual: Virtual | None = None

    @property
    def placement(self) -> Placement:
        return Placement(num_stages=self.layout.num_stages, num_ranks=self.layout.num_ranks, style=self.layout.style)

    @property
    def shards(self) -> Iterator[Shard]:
        return (shard for stage in self.stages for shard in stage.shards)
