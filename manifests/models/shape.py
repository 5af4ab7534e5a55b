"""A model as its files see it, and what one token costs each of its modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import prod

from manifests.brief import brief
from manifests.schema import ModelDescription

Shape = tuple[int, ...]
_EXPERTS = re.compile(r"\.(experts|block_sparse_moe\.(?:input|output)_linear)\.")  # in the names of their tensors
BACKWARD_SHARE = 2  # backward FLOPs for each forward one: a product for either operand's gradient


def is_layer(module: str) -> bool:
    """Return whether a module is a layer, by its name."""
    return module.rpartition(".")[2].isdecimal()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensors:
    """The tensors in files, by their names there, and the place that errors name."""

    tensors: Mapping[str, Shape]
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one token costs a module in the forward pass, and what is kept of it for the backward pass.

    FLOPs are those of matrix products, a multiplication and an addition counted as two, as
    `torch.utils.flop_counter` counts them. Attention is counted over all keys of the sequence, masked
    ones too: what a causal mask or a window saves depends on the kernel.

    Kept are the inputs of the operations whose gradients need them, each tensor once, without
    activation checkpointing; what attention of several operations keeps for each key is apart.
    """

    flops: int = 0
    flops_per_key: int = 0  # for each token that is attended to
    saved: int = 0  # elements, in the compute dtype
    saved_fp32: int = 0  # elements, in float32 whatever the compute dtype
    normed: int = 0  # elements that norms over the model's width give
    whole: int = 0  # of the elements saved, those of these norms, which tensor parallelism does not divide
    whole_fp32: int = 0  # of those in float32, likewise
    products: int = 0  # elements that matrix products and attention give: what `--ac selective` keeps
    keys: int = 0  # of the elements saved, keys and values that heads share
    scores: int = 0  # elements for each key, in the compute dtype
    softmaxes: int = 0  # heads whose softmax is computed in float32, kept so, and rounded

    def __add__(self, other: Work) -> Work:
        return Work(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(Work)})

    def __sub__(self, other: Work) -> Work:
        return Work(**{item.name: getattr(self, item.name) - getattr(other, item.name) for item in fields(Work)})

    def forward_flops(self, seq_len: int) -> int:
        """Return the FLOPs of one token's forward pass in a sequence of `seq_len` tokens."""
        return self.flops + self.flops_per_key * seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The modules, in the order they run, and every tensor they have, by FQN.

    Each tied FQN is listed in `tensors`; `ties` groups them, owner first. Decoder layers past
    `num_layers` are multi-token prediction (MTP) layers.
    """

    architecture: str
    num_layers: int
    modules: tuple[str, ...]
    tensors: Mapping[str, Shape]
    ties: tuple[tuple[str, ...], ...] = ()
    ignored_suffixes: tuple[str, ...] = ()  # tensors that old files carry and the model recomputes
    untrained_suffixes: tuple[str, ...] = ()  # tensors that are not parameters: buffers and scales
    packed_suffixes: tuple[str, ...] = ()  # tensors with two parameters in each element
    float32_suffixes: tuple[str, ...] = ()  # parameters that are float32 in a model of any dtype
    whole_suffixes: tuple[str, ...] = ()  # matrices that every tensor-parallel rank has whole
    hands_on_float32: bool = False  # whether hidden states between layers are float32 whatever the compute dtype
    optional: frozenset[str] = frozenset()  # modules that a checkpoint may lack, each as a whole
    work: Mapping[str, Work] = field(default_factory=dict)  # of each module
    hidden_size: int = 0  # width of what one module hands to the next
    windows: Mapping[str, int] = field(default_factory=dict)  # of layers that see no whole rows, in tokens
    is_estimated: bool = False  # whether `work` was made of the sizes of tensors, not of the modules' arithmetic
    # How many tensors of its module, all alike, a tensor stands for, where it is not one: in estimates for GPUs.
    copies: Mapping[str, int] = field(default_factory=dict)
    base: str = ""  # what files of the model without its head leave out in front of every name
    # What a plan asks for several times, of up to a hundred thousand tensors.
    _owned: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _experts: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    __repr__ = brief

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; a tied one counts once."""
        replicas = {fqn for group in self.ties for fqn in group[1:]}
        return sum(self.count_params(fqn) for fqn in self.tensors if fqn not in replicas)

    @property
    def trained(self) -> dict[str, Shape]:
        """The shapes of the parameters: neither buffers nor scales."""
        return {fqn: dims for fqn, dims in self.tensors.items() if not fqn.endswith(self.untrained_suffixes)}

    def count_params(self, fqn: str) -> int:
        """Return the number of trained parameters that a tensor has."""
        if fqn.endswith(self.untrained_suffixes):
            return 0
        return prod(self.tensors[fqn]) * (2 if fqn.endswith(self.packed_suffixes) else 1)

    def count_experts(self) -> Mapping[str, int]:
        """Return how many experts each module has."""
        for fqn, shape in () if self._experts else self.tensors.items():
            if match := _EXPERTS.search(fqn):
                number = fqn[match.end() :].partition(".")[0]
                count = int(number) + 1 if number.isdecimal() else shape[0]
                module = fqn[: match.end(1)]
                self._experts[module] = max(self._experts.get(module, 0), count)
        return self._experts

    def train_flops(self, seq_len: int) -> int:
        """Return the FLOPs of one token's forward and backward pass through the whole model."""
        return (1 + BACKWARD_SHARE) * sum(work.forward_flops(seq_len) for work in self.work.values())

    def fqn_of(self, stored: str) -> str:
        """Return the FQN of a tensor by the name that a file of the source has for it."""
        if self.base and module_of(stored, self.work) is None:
            whole = f"{self.base}{stored}"
            return stored if module_of(whole, self.work) is None else whole
        return stored

    def by_module(self) -> Mapping[str, tuple[str, ...]]:
        """Return the FQNs of each module's tensors, in the order of `tensors`."""
        if not self._owned:
            fqns_of: dict[str, list[str]] = {module: [] for module in self.modules}
            for fqn in self.tensors:
                module = module_of(fqn, fqns_of)
                assert module is not None, fqn
                fqns_of[module].append(fqn)
            self._owned.update({module: tuple(fqns) for module, fqns in fqns_of.items()})
        return self._owned

    def without(self, modules: Collection[str]) -> ModelShape:
        """Return the shape of a checkpoint that lacks some of the `optional` modules."""
        assert self.optional.issuperset(modules), modules
        if not modules:
            return self
        rest = {module: fqns for module, fqns in self.by_module().items() if module not in modules}
        gone = {fqn for module in modules for fqn in self.by_module().get(module, ())}
        shape = replace(
            self,
            modules=tuple(rest),
            tensors={fqn: dims for fqn, dims in self.tensors.items() if fqn not in gone},
            optional=self.optional.difference(modules),
            work={module: work for module, work in self.work.items() if module not in modules},
        )
        shape._owned.update(rest)
        return shape


@lru_cache(maxsize=1 << 17)
def is_expert(fqn: str) -> bool:
    """Return whether a tensor is of an expert, or of all experts of a layer: not of those that every token goes to."""
    return _EXPERTS.search(fqn) is not None


def module_of(fqn: str, modules: Container[str]) -> str | None:
    """Return the module that owns a tensor: the longest dotted prefix among `modules`, or the tensor's own name."""
    if fqn in modules:
        return fqn
    end = fqn.rfind(".")
    while end >= 0:
        if (prefix := fqn[:end]) in modules:
            return prefix
        end = fqn.rfind(".", 0, end)
    return None


_NAME = re.compile(r"[^.\s]+(\.[^.\s]+)*")  # words with dots between them
_REQUIRED = ("inputs", "layers", "outputs")
_BESIDE = ("inputs", "outputs", "spare")  # the modules that are not layers
_OF_TENSORS = ("buffers", "ignored")  # the ends of names, which may begin with a dot


def description_problems(description: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    """Yield what no model can be, each as (field, problem, whether two modules overlap)."""
    yield from _invalid_names(description)
    if len(description.count) != len(description.layers):
        problem = f"expected a config field for each of {len(description.layers)} lists of layers"
        yield "count", f"{problem}, found {len(description.count)}", False
    if description.mtp is not None and len(description.layers) > 1:
        yield "mtp", "expected one list of layers, which MTP layers follow", False
    times = Counter(fqn for group in description.ties for fqn in group)
    for number, group in enumerate(description.ties):
        if len(group) < 2 or any(times[fqn] > 1 for fqn in group):
            yield f"ties[{number}]", "expected two or more names, each once", False
    yield from _overlaps(description)
    yield from _numbered(description)


def _invalid_names(description: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    for name in (item.name for item in fields(description)):
        value = getattr(description, name)
        if name in _REQUIRED and not value:
            yield name, "expected one or more names, found none", False
        for place, text in _texts(name, value):
            if not _NAME.fullmatch(text.removeprefix(".") if name in _OF_TENSORS else text):
                yield place, f"expected a name such as model.norm, found {text[:80]!r}", False


def _texts(place: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _texts(f"{place}[{number}]", item)


def _numbered(description: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    for name in _BESIDE:
        for number, module in enumerate(getattr(description, name)):
            if is_layer(module):
                problem = f"expected the name of the module around it: {module} would be counted as a layer"
                yield f"{name}[{number}]", problem, False


def _overlaps(description: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    """Yield the modules that are listed twice, or inside another."""
    listed = [
        (f"{name}[{number}]", module)
        for name in (*_REQUIRED, "spare")
        for number, module in enumerate(getattr(description, name))
    ]
    first: dict[str, str] = {}
    for place, module in listed:
        if module in first:
            yield place, f"{module} is also {first[module]}", True
        first.setdefault(module, place)
    for place, module in listed:
        end = module.rfind(".")
        while end >= 0 and module[:end] not in first:
            end = module.rfind(".", 0, end)
        if end >= 0:
            around = module[:end]
            yield place, f"{module} is inside {around}, which is {first[around]}", True
