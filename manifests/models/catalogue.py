"""The catalogue: what files of an architecture contain, for those that no module here describes by hand.

`catalogue.json` is written from transformers by `make catalogue`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from manifests.models.config import MAX_LAYERS
from manifests.schema import ModelDescription

_PATH = Path(__file__).with_name("catalogue.json")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ALIASES = {"MPTForCausalLM": "MptForCausalLM"}  # MosaicML's own name for it
_OUTSIDE = -1  # instead of a kind of layer: the tensors outside layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A config field that is true (not null, 0 or empty), or is not."""

    name: str
    value: bool
    absent: bool  # whether a config without the field means this value

    def applies(self, config: Mapping[str, object]) -> bool:
        return bool(config[self.name]) == self.value if self.name in config else self.absent


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """Config fields that together add or remove tensors."""

    when: tuple[Condition, ...]
    changes: Mapping[int, tuple[frozenset[str], frozenset[str]]]  # by kind of layer: names added, names removed


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered:
    """Tensors outside layers of which there are as many as a config field says, and `more`."""

    pattern: str  # with `*` for the number
    name: str
    more: int
    absent: int  # what a config without the field means

    def names(self, config: Mapping[str, object]) -> frozenset[str]:
        count = config.get(self.name)
        number = self.absent if count is None else min(count, MAX_LAYERS) if type(count) is int else 0
        return frozenset(self.pattern.replace("*", str(place)) for place in range(number + self.more))


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """An architecture by the names in its files.

    `kinds` are the sets of names that layers have, each relative to the layer, with `*` for the number of an expert;
    without any, layers are compared with each other alone.
    """

    architecture: str
    inputs: tuple[str, ...]  # modules before the layers, in the order they run
    layers: str  # the list of layers
    outputs: tuple[str, ...]  # modules after the layers; the last turns hidden states into logits
    count: tuple[str, ...] = ("num_hidden_layers",)  # what a config may call the number of layers
    width: tuple[str, ...] = ("hidden_size",)
    outside: frozenset[str] = frozenset()  # tensors outside layers
    kinds: tuple[frozenset[str], ...] = ()
    places: Mapping[int, int] = field(default_factory=dict)  # kinds that only the first (0) or last (-1) layer is
    only: Mapping[int, tuple[Condition, ...]] = field(default_factory=dict)  # of kinds that not every config has
    numbered: tuple[Numbered, ...] = ()
    switches: tuple[Switch, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()  # owner and replica, where the config says that embeddings are tied
    tied: bool = False  # what a config means that does not say
    tied_by_section: bool = False  # whether they are tied, too, if its `section` says so
    buffers: tuple[str, ...] = ()  # ends of names of tensors that nobody trains
    float32: tuple[str, ...] = ()  # ends of names of parameters that models of any dtype have in float32
    residual_in_fp32: bool | None = None  # what a config means that lacks this field; None: none has it
    ignored: tuple[str, ...] = ()  # ends of names of tensors that files may have and the model computes
    mtp: str | None = None  # the field that counts MTP layers, numbered after the others
    spare: tuple[str, ...] = ()  # modules that files may have and the model lacks
    section: str = ""  # the object in the config that describes the decoder, where it takes images or sound as well
    towers: tuple[str, ...] = ()  # modules for images and sound, which go before the inputs as they are
    uneven: bool = False  # whether files have more experts of one matrix than of another
    per_key: tuple[float, ...] = ()  # by kind of layer: FLOPs for each key, in widths of all heads
    kept: tuple[float, ...] = ()  # by kind of layer: what autograd keeps, as a multiple of what matrices and norms say
    keeps_scores: bool = False  # whether its attention is several operations, each of which keeps its result
    all_experts: bool = False  # whether transformers computes every expert for every token
    num_results: int = 0  # how many results a layer of transformers returns in a tuple; 0: one tensor, not in a tuple
    carried: tuple[str, ...] = ()  # what layers take beside the hidden state that depends on the tokens, by name
    reshapes: bool = False  # whether the hidden state of layers has another shape than (B, L, D)
    refused: str = ""  # why stages on transformers' own forward are not known to compute what the whole model does
    no_tp: str = ""  # why its matrices are not sharded over tensor-parallel ranks
    whole: tuple[str, ...] = ()  # ends of names of matrices that each of these ranks has whole
    distributes_experts: bool = False  # whether transformers' plan distributes them over ranks
    no_cp: bool = False  # whether ranks with a part of each row do not compute what one process does
    aux_loss: bool = False  # whether transformers' forward adds the load-balancing loss of its routers' logits
    router_bias: str = ""  # the dtype of the biases of its routers in a model in bfloat16; "": it has none
    latent: bool = False  # whether a head's width is that of latent attention
    more_layers: tuple[tuple[str, tuple[str, ...]], ...] = ()  # lists of layers after the first, each with its `count`
    is_described: bool = False  # by a user, not by the catalogue

    @property
    def hands_on_trees(self) -> bool:
        """Whether more than one tensor (B, L, D) crosses between stages."""
        return bool(self.carried) or self.reshapes

    def names(self, config: Mapping[str, object]) -> tuple[frozenset[str], dict[int, frozenset[str]]]:
        """Return the names outside layers, and of each kind of layer, that a config's model has."""
        outside = self.outside.union(*(numbered.names(config) for numbered in self.numbered))
        kinds = dict(enumerate(self.kinds))
        for switch in self.switches:
            if all(condition.applies(config) for condition in switch.when):
                for kind, (added, removed) in switch.changes.items():
                    if kind == _OUTSIDE:
                        outside = (outside | added) - removed
                    else:
                        kinds[kind] = (kinds[kind] | added) - removed
        absent = {kind for kind, when in self.only.items() if not all(condition.applies(config) for condition in when)}
        return outside, {kind: names for kind, names in kinds.items() if kind not in absent}

    @property
    def all_names(self) -> frozenset[str]:
        """The names that models of any config have: outside layers, and in layers, with `*` for numbers."""
        patterns = {numbered.pattern for numbered in self.numbered}
        added = (names for switch in self.switches for names, _ in switch.changes.values())
        return self.outside.union(patterns, *self.kinds, *added)

    def has(self, fqn: str) -> bool:
        """Return whether models of some config have a tensor of this name, in any layer."""
        inside = fqn.removeprefix(f"{self.layers}.")
        name = inside.partition(".")[2] if inside != fqn else fqn
        return not self.all_names.isdisjoint((name, _NUMBER.sub("*", f".{name}")[1:]))


def catalogued() -> tuple[str, ...]:
    return tuple(_table()["architectures"])


def left_out() -> Mapping[str, str]:
    """Return the architectures of transformers that the catalogue lacks, each with the reason."""
    modules: Mapping[str, str] = _table()["left_out"]
    return modules


def entry_of(architecture: str) -> CatalogueEntry | None:
    architecture = _ALIASES.get(architecture, architecture)
    document = _table()["architectures"].get(architecture)
    return None if document is None else make_entry(architecture, document)


def make_entry(architecture: str, table: Mapping[str, Any]) -> CatalogueEntry:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    fields["outside"] = frozenset(fields.get("outside", ()))
    fields["kinds"] = tuple(frozenset(names) for names in fields.get("kinds", ()))
    fields["places"] = {int(kind): place for kind, place in fields.get("places", {}).items()}
    fields["ties"] = tuple((owner, replica) for owner, replica in fields.get("ties", ()))
    fields["only"] = {int(kind): _conditions(when) for kind, when in fields.get("only", {}).items()}
    fields["numbered"] = tuple(
        Numbered(pattern=pattern, name=name, more=more, absent=absent)
        for pattern, name, more, absent in fields.get("numbered", ())
    )
    fields["switches"] = tuple(_switch(switch) for switch in fields.get("switches", ()))
    return CatalogueEntry(architecture=architecture, **fields)


def _switch(document: Mapping[str, Any]) -> Switch:
    changes = {kind: (frozenset(added), frozenset(removed)) for kind, added, removed in document["changes"]}
    return Switch(when=_conditions(document["when"]), changes=changes)


def _conditions(conditions: Iterable[tuple[str, bool, bool]]) -> tuple[Condition, ...]:
    return tuple(Condition(name=name, value=value, absent=absent) for name, value, absent in conditions)


@cache
def _table() -> Mapping[str, Any]:
    # Read when a model is asked for that no module describes, so that start-up does not pay for it.
    document: Mapping[str, Any] = json.loads(_PATH.read_text())
    return document


def described_entry(description: ModelDescription, architecture: str) -> CatalogueEntry:
    """Return what a description says in the form of the catalogue."""
    (layers, count), *more = zip(description.layers, description.count, strict=True)
    return CatalogueEntry(
        architecture=architecture,
        inputs=description.inputs,
        layers=layers,
        more_layers=tuple((layers, (count,)) for layers, count in more),
        outputs=description.outputs,
        count=(count,),
        width=(description.width,),
        kinds=tuple(map(frozenset, description.kinds)),
        ties=tuple((group[0], replica) for group in description.ties for replica in group[1:]),
        tied=description.tied,
        buffers=tuple(f".{name.removeprefix('.')}" for name in description.buffers),
        ignored=tuple(name.removeprefix(".") for name in description.ignored),
        mtp=description.mtp,
        spare=description.spare,
        is_described=True,
    )
