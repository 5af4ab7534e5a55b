"""The catalogue: what files of an architecture contain, for those that no module here describes by hand.

`catalogue.json` is written from transformers by `make catalogue`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["CatalogueEntry", "Switch", "catalogued", "entry_of", "left_out", "make_entry"]

_PATH = Path(__file__).with_name("catalogue.json")
_OUTSIDE = -1  # instead of a kind of layer: the tensors outside layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A config field that adds or removes tensors when it has a `value`."""

    name: str
    value: object
    absent: bool  # whether a config without the field means this value
    changes: Mapping[int, tuple[frozenset[str], frozenset[str]]]  # by kind of layer: names added, names removed

    def applies(self, config: Mapping[str, object]) -> bool:
        if self.name not in config:
            return self.absent
        found = config[self.name]
        return found == self.value and isinstance(found, bool) == isinstance(self.value, bool)


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
    switches: tuple[Switch, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()  # owner and replica, where the config says that embeddings are tied
    tied: bool = False  # what a config means that does not say
    buffers: tuple[str, ...] = ()  # ends of names of tensors that nobody trains
    ignored: tuple[str, ...] = ()  # ends of names of tensors that files may have and the model computes
    mtp: str | None = None  # the field that counts MTP layers, numbered after the others
    spare: tuple[str, ...] = ()  # modules that files may have and the model lacks
    section: str = ""  # the object in the config that describes the decoder, where it takes images or sound as well
    towers: tuple[str, ...] = ()  # modules for images and sound, which go before the inputs as they are
    uneven: bool = False  # whether files have more experts of one matrix than of another
    per_key: tuple[float, ...] = ()  # by kind of layer: FLOPs for each key, in widths of all heads
    all_experts: bool = False  # whether transformers computes every expert for every token
    num_results: int = 0  # how many results a layer of transformers returns in a tuple; 0: one tensor, not in a tuple
    carried: tuple[str, ...] = ()  # what layers take beside the hidden state that depends on the tokens, by name
    reshapes: bool = False  # whether the hidden state of layers has another shape than (B, L, D)
    refused: str = ""  # why stages on transformers' own forward are not known to compute what the whole model does
    no_tp: str = ""  # why its matrices are not sharded over tensor-parallel ranks
    latent: bool = False  # whether a head's width is that of latent attention
    more_layers: tuple[tuple[str, tuple[str, ...]], ...] = ()  # lists of layers after the first, each with its `count`
    is_described: bool = False  # by a user, not by the catalogue

    @property
    def hands_on_trees(self) -> bool:
        """Whether more than one tensor (B, L, D) crosses between stages."""
        return bool(self.carried) or self.reshapes

    def names(self, config: Mapping[str, object]) -> tuple[frozenset[str], tuple[frozenset[str], ...]]:
        """Return the names outside layers and of each kind of layer that a config's model has."""
        outside, kinds = self.outside, list(self.kinds)
        for switch in self.switches:
            if switch.applies(config):
                for kind, (added, removed) in switch.changes.items():
                    if kind == _OUTSIDE:
                        outside = (outside | added) - removed
                    else:
                        kinds[kind] = (kinds[kind] | added) - removed
        return outside, tuple(kinds)


def catalogued() -> tuple[str, ...]:
    """Return the architectures of the catalogue."""
    return tuple(_table()["architectures"])


def left_out() -> Mapping[str, str]:
    """Return the architectures of transformers that the catalogue lacks, each with the reason."""
    found: Mapping[str, str] = _table()["left_out"]
    return found


def entry_of(architecture: str) -> CatalogueEntry | None:
    """Return an architecture's entry, if it has one."""
    found = _table()["architectures"].get(architecture)
    return None if found is None else make_entry(architecture, found)


def make_entry(architecture: str, table: Mapping[str, Any]) -> CatalogueEntry:
    """Return the entry that a table of the catalogue says."""
    fields: dict[str, Any] = {**table, "architecture": architecture}
    for name in ("inputs", "outputs", "count", "width", "buffers", "ignored", "spare", "towers", "per_key", "carried"):
        if name in fields:
            fields[name] = tuple(fields[name])
    fields["outside"] = frozenset(fields.get("outside", ()))
    fields["kinds"] = tuple(frozenset(names) for names in fields.get("kinds", ()))
    fields["places"] = {int(kind): place for kind, place in fields.get("places", {}).items()}
    fields["ties"] = tuple((owner, replica) for owner, replica in fields.get("ties", ()))
    fields["switches"] = tuple(_switch(found) for found in fields.get("switches", ()))
    return CatalogueEntry(**fields)


def _switch(found: Mapping[str, Any]) -> Switch:
    changes = {kind: (frozenset(added), frozenset(removed)) for kind, added, removed in found["changes"]}
    return Switch(name=found["field"], value=found["value"], absent=found["absent"], changes=changes)


@cache
def _table() -> Mapping[str, Any]:
    # Read when a model is asked for that no module describes, so that start-up does not pay for it.
    found: Mapping[str, Any] = json.loads(_PATH.read_text())
    return found
