"""The manifest's types, version 2. SPEC.md explains each field; field names are the JSON keys.

A field with `SINCE_2` was added in version 2. Where all of these have their defaults, version 1 is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from manifests.brief import brief
from manifests.placement import Placement, Style

FORMAT = "reshard-manifest"
VERSIONS = (1, 2)
SINCE_2: Mapping[str, int] = {"since": 2}  # of a field
MODEL_CARD_NAME = "README.md"
GIT_ATTRIBUTES_NAME = ".gitattributes"  # which the hub makes in each repository, and changes

Holds = str  # "weights", or a kind of optimizer state, such as "exp_avg"
Decay = Literal["constant", "linear", "cosine", "sqrt"]
StateShape = Literal["parameter", "vector", "matrix", "rows", "columns", "scalar"]
TrainedDtype = Literal["F64", "F32", "F16", "BF16"]
WEIGHTS: Holds = "weights"
MOMENTS: tuple[Holds, ...] = ("exp_avg", "exp_avg_sq")  # of AdamW and Adam


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file of a bundle. `nbytes` is the file's size; see `Header.digest`."""

    path: str  # below the manifest's folder, "/" between its parts
    nbytes: int
    digest: str
    holds: Holds = WEIGHTS  # or optimizer state, under the FQNs of its parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Bytes `begin` to `end` of `Virtual.files[file]`: whole, adjacent tensors."""

    file: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A contiguous piece of the model and the bundle of its tensors (`nbytes` of data).

    A bundle consists of shards or, if it is virtual, of spans of the original files.
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

    __repr__ = brief


@dataclass(frozen=True, kw_only=True, slots=True)
class TieMember:
    """One name of a tied parameter, on the stage that uses it."""

    fqn: str
    stage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TieGroup:
    """FQNs naming one parameter, such as the input embedding and the LM head."""

    owner: TieMember  # the copy that export writes
    replicas: tuple[TieMember, ...]  # at least one; may be on other stages

    @property
    def members(self) -> tuple[TieMember, ...]:
        return (self.owner, *self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout as requested, and the resulting placement."""

    spec: str
    style: Style
    num_stages: int
    num_ranks: int
    num_virtual: int
    schedule: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """The modules of a model of an unknown architecture, as `--model` gave them.

    A module owns the tensors below its name, or is itself a tensor. Names in `buffers` and `ignored` are the ends of
    FQNs, at a dot; `kinds` lists what a layer of each kind has, relative to the layer, with `*` for numbers.
    """

    inputs: tuple[str, ...]  # before the layers, in the order they run
    layers: tuple[str, ...]  # lists of layers, in the order they run
    outputs: tuple[str, ...]
    count: tuple[str, ...]  # for each list: the field of config.json that counts its layers
    width: str  # the field that has the width of hidden states
    tied: bool  # whether `ties` are tied if config.json has no tie_word_embeddings
    architecture: str | None = None  # None: config.json names it
    ties: tuple[tuple[str, ...], ...] = ()  # FQNs, owner first
    buffers: tuple[str, ...] = ()  # tensors that are not trained
    ignored: tuple[str, ...] = ()  # tensors that files may have and the model computes
    spare: tuple[str, ...] = ()  # modules that files may have and the model lacks
    mtp: str | None = None  # the field that counts MTP layers
    kinds: tuple[tuple[str, ...], ...] = ()  # without any, layers are compared with each other alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    architecture: str
    num_layers: int
    num_params: int  # a tied parameter counts once
    description: ModelDescription | None = None  # None: `architecture` says it


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the weights came from. `left_out` lists weight files of the source that were not packed."""

    kind: str
    location: str
    revision: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """A manifest that this one was made from: its location and the digest of its manifest.json."""

    location: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxiliaryFile:
    """A small file of the source (config, tokenizer), copied byte for byte."""

    path: str
    nbytes: int
    digest: str

    @property
    def compared_digest(self) -> str | None:
        """The digest that the file must have; None for README.md and .gitattributes, which are edited on the hub."""
        return None if self.path in (MODEL_CARD_NAME, GIT_ATTRIBUTES_NAME) else self.digest


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmOption:
    """An argument of an optimizer's class that the group has no field for; `value` is JSON."""

    name: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """An optimizer's options and the parameters they apply to; without FQNs: all that no other group lists.

    The betas and `eps` are those of AdamW and Adam, and 0 in groups of other algorithms, whose arguments are `options`.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    fqns: tuple[str, ...] = ()  # or patterns of them; the first group that matches has the parameter
    algorithm: str | None = field(default=None, metadata=SINCE_2)  # None: the optimizer's
    rate_factor: float | None = field(default=None, metadata=SINCE_2)  # of the learning rate; None: 1
    skips_clipping: bool = field(default=False, metadata=SINCE_2)
    options: tuple[AlgorithmOption, ...] = field(default=(), metadata=SINCE_2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateKind:
    """A kind of optimizer state, which shards of this name have: its shape, and the numbers of the groups that have it.

    Its shape is the parameter's; or that alone of parameters with less than two dimensions (`vector`), or with two or
    more (`matrix`), of which `rows` has a number for each row and `columns` for each column; or one number (`scalar`).
    """

    name: str
    shape: StateShape
    groups: tuple[int, ...] = ()  # none: all


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """The optimizer whose state is in the shards. `name` is its class in `torch.optim`, or a dotted name."""

    name: str
    max_norm: float  # of gradient clipping; 0: no clipping
    groups: tuple[ParameterGroup, ...]
    kinds: tuple[StateKind, ...] | None = field(default=None, metadata=SINCE_2)  # None: those of AdamW
    ema: float = field(default=0.0, metadata=SINCE_2)  # decay of the average of the weights; 0: there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Linear warmup to `peak`, `stable_steps` at it, then `decay` to `minimum`, which is reached at `decay_steps`."""

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
    """Where a source's next document begins: `item` counts files, or shuffled items, in the order of this epoch."""

    epoch: int  # completed epochs
    item: int
    offset: int  # consumed part of the item


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCursor:
    """The position in the sources at which the next sequence begins: earlier data need not be read."""

    num_documents: int  # consumed, of all sources together
    num_tokens: int  # consumed of the document that comes next
    sources: tuple[SourcePosition, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """The data position: how many sequences all ranks together have consumed."""

    num_sequences: int
    digest: str  # of everything that determines the order of sequences
    cursor: DataCursor | None = None  # None: skip sequences by reading them


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """The RNG state of a rank's generator, in base64."""

    rank: int
    generator: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """How far the weights were trained, and the state to resume from.

    `step` and `num_tokens` (tokens that counted in the loss) are of the whole run, resumes included. Shards have
    optimizer state if `optimizer` is not None.
    """

    step: int
    num_tokens: int
    dtype: TrainedDtype | None = None  # of the trained parameters, as in a shard's header
    compute_dtype: TrainedDtype | None = None  # of the copies of them that stages compute with; None: no copies
    reduce_dtype: TrainedDtype | None = None  # of gradients while they are reduced; None: `dtype`
    optimizer: OptimizerState | None = None
    learning_rate: LearningRate | None = None
    batch: BatchSizes | None = None
    data: DataPosition | None = None
    random: tuple[RandomState, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginalFile:
    """A weight file of the source, which must be unchanged since the manifest was written."""

    path: str  # below the location
    nbytes: int
    pin: str  # its fingerprint, see `stores.base.InputFile.fingerprint`
    digest: str  # of its header, see `Header.digest`


@dataclass(frozen=True, kw_only=True, slots=True)
class Virtual:
    """The original files that virtual bundles refer to, and their folder."""

    location: str  # an absolute path or a URL, without the revision
    files: tuple[OriginalFile, ...]
    revision: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Every bundle of a checkpoint, the placement of its stages, and where the weights came from."""

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

    __repr__ = brief

    @property
    def placement(self) -> Placement:
        return Placement(num_stages=self.layout.num_stages, num_ranks=self.layout.num_ranks, style=self.layout.style)

    @property
    def shards(self) -> Iterator[Shard]:
        return (shard for stage in self.stages for shard in stage.shards)
