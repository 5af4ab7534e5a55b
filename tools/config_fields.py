"""Which config fields of an architecture decide what tensors it has: every field is changed, on the meta device.

Of each field the other truth value is tried, and of numbers and lists a few values besides. A field then is one of

- a switch: its truth value adds tensors to, or removes them from, all layers of a kind, or outside layers;
- a count: as many tensors outside layers as the field says;
- a choice of layers: they are of further kinds for some value of it.

Switches are tried in pairs as well, since one may add a bias to the matrix that another removes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models.catalogue import make_entry
from manifests.models.shape import module_of
from tools.parity import SHARED_LAYERS
from tools.tiny_models import LAYERS, tiny_config

# Fields whose value decides which layers are of which kind, with values for which there may be further kinds.
_KINDS: tuple[tuple[str, Any], ...] = (
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [LAYERS - 1]),
    ("mlp_only_layers", [0]),
    ("first_k_dense_replace", LAYERS - 1),
    ("moe_layers", [1]),
    *SHARED_LAYERS,
)
# What lists of layers' types in configs may have; attention over a window has the tensors of full attention.
_TYPES: tuple[frozenset[str], ...] = (
    frozenset(("chunked_attention", "compressed_sparse_attention", "conv", "full_attention",
               "heavily_compressed_attention", "hybrid", "indexed_attention", "linear_attention", "minimax_m3_sparse",
               "sliding_attention")),
    frozenset(("dense", "hash_moe", "moe", "sparse")),
    frozenset(("full", "shared")),
)  # fmt: skip
# Fields that say nothing about tensors, or that the manifest's own rules follow.
_OTHER_FIELDS = (
    "architectures", "dtype", "id2label", "label2id", "model_type", "return_dict", "tie_word_embeddings",
    "transformers_version", "use_cache",
)  # fmt: skip
_OUTSIDE = -1  # instead of a kind of layer
_PLAIN: Mapping[str, Any] = {"inputs": (), "layers": "", "outputs": ()}  # of an entry that says tensors alone
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Names = frozenset[str]
_Deltas = dict[int, tuple[list[str], list[str]]]  # by kind of layer: names added, names removed


class NotDescribedError(Exception):
    """An architecture that the catalogue cannot hold, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """The names that files of one config have: outside layers, and in each layer, numbers of experts as `*`."""

    outside: Names
    layers: tuple[Names, ...]


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Tiny models of a class by changes to its decoder's config."""

    model_class: type[PreTrainedModel]
    prefix: str  # of the list of layers in files
    towers: Collection[str]  # modules whose tensors are not listed

    def tensors(self, changes: Mapping[str, Any]) -> Tensors:
        """Return the tensors of the model with these changes.

        Raises:
            NotDescribedError: files have its layers otherwise, or some tensor is empty.
            Exception: whatever transformers raises of a config that it refuses.
        """
        changes = {"text_config": dict(changes)} if self.towers and changes else changes
        model = build(self.model_class, tiny_config(self.model_class, **changes), "meta")
        if any(parameter.numel() == 0 for parameter in model.parameters()):
            raise NotDescribedError("some of its tensors are empty")
        return self.tensors_of(model)

    def tensors_of(self, model: PreTrainedModel) -> Tensors:
        layers: dict[int, set[str]] = {}
        outside = set()
        for name in names_in_files(model, model.state_dict()):
            if name.startswith(f"{self.prefix}."):
                number, _, leaf = name.removeprefix(f"{self.prefix}.").partition(".")
                layers.setdefault(int(number), set()).add(_NUMBER.sub("*", f".{leaf}")[1:])
            elif module_of(name, self.towers) is None:
                outside.add(name)
        if sorted(layers) != list(range(len(layers))):
            raise NotDescribedError("some of its layers have no tensors")
        return Tensors(outside=frozenset(outside), layers=tuple(frozenset(layers[number]) for number in sorted(layers)))


@dataclass(kw_only=True, slots=True)
class Fields:
    """What fields of a config decide, as the catalogue has it."""

    outside: Names  # without those that a field counts
    kinds: list[Names] = field(default_factory=list)  # of layers
    only: dict[str, list[list[Any]]] = field(default_factory=dict)  # conditions by kind, for those that have any
    numbered: list[list[Any]] = field(default_factory=list)
    switches: list[dict[str, Any]] = field(default_factory=list)

    def table(self) -> dict[str, Any]:
        """Return the fields of a catalogue's entry that are not empty."""
        found = {
            "outside": sorted(self.outside), "numbered": self.numbered, "kinds": [sorted(kind) for kind in self.kinds],
            "only": self.only, "switches": self.switches,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value or name in ("outside", "kinds")}


def build(model_class: type[PreTrainedModel], config: Any, device: str) -> PreTrainedModel:
    with torch.device(device):
        return model_class(config).eval()


def names_in_files(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    state = model.state_dict()
    return sorted(revert_weight_conversion(model, {name: state[name] for name in names}))


def scan_fields(variants: Variants, config: Any, base: Tensors) -> Fields:
    """Return what every field of a decoder's config decides about tensors; `base` are those of the tiny config."""
    default = type(config)().to_dict()
    return _Scan(variants=variants, config=config.to_dict(), default=default, base=base).run()


@dataclass(kw_only=True)
class _Scan:
    variants: Variants
    config: Mapping[str, Any]
    default: Mapping[str, Any]
    base: Tensors

    def __post_init__(self) -> None:
        self.fields = Fields(outside=self.base.outside)
        self.models: list[tuple[Mapping[str, Any], Tensors]] = []  # which have layers of every kind between them

    def run(self) -> Fields:
        self._add({}, self.base)
        for changes in _other_layers(self.config):
            self._add(changes, self._try(changes))
        tried = {name: self._try_values(name) for name in sorted(self.config) if name not in _OTHER_FIELDS}
        tried = {name: values for name, values in tried.items() if values and not self._is_count(name, values)}
        flips = {name: value for name, values in tried.items() if (value := self._flip(name, values)) is not None}
        for name in sorted(tried.keys() - flips):
            self._choose_layers(name, tried[name])
        for name, (value,) in flips.items():
            self._switch({name: value})
        for one, other in combinations([switch["when"][0][0] for switch in self.fields.switches], 2):
            self._switch({one: flips[one][0], other: flips[other][0]})
        return self.fields

    def _try(self, changes: Mapping[str, Any]) -> Tensors | None:
        try:
            return self.variants.tensors(changes)
        except Exception:  # a combination that transformers refuses
            return None

    def _try_values(self, name: str) -> list[tuple[Any, Tensors]]:
        """Return other values of a field, and what tensors they lead to, if some lead to others than before."""
        tried = [(value, self._try({name: value})) for value in _alternatives(self.config[name])]
        found = [(value, tensors) for value, tensors in tried if tensors is not None]
        has_others = any(tensors.outside != self.base.outside or self._new_kinds(tensors) for _, tensors in found)
        return found if has_others else []

    def _new_kinds(self, tensors: Tensors) -> list[Names]:
        return [kind for kind in dict.fromkeys(tensors.layers) if kind not in self.fields.kinds]

    def _add(self, changes: Mapping[str, Any], tensors: Tensors | None) -> None:
        if tensors is not None and (kinds := self._new_kinds(tensors)):
            self.fields.kinds += kinds
            self.models.append((changes, tensors))

    def _is_count(self, name: str, values: Sequence[tuple[Any, Tensors]]) -> bool:
        """Note the tensors outside layers of which there are as many as a field says, if there are any."""
        numbers = {number: tensors for number, tensors in [(self.config[name], self.base), *values]
                   if type(number) is int and number > 0}  # fmt: skip
        patterns = {_NUMBER.sub("*", other) for tensors in numbers.values() for other in tensors.outside}
        before = len(self.fields.numbered)
        for pattern in sorted(pattern for pattern in patterns if pattern.count("*") == 1):
            counts = {number: _count(pattern, tensors) for number, tensors in numbers.items()}
            offset = max(counts.values()) - max(counts)
            if len(set(counts.values())) > 1 and all(counts[number] == max(number + offset, 0) for number in counts):
                self.fields.numbered.append([pattern, name, offset, self.default[name]])
                self.fields.outside -= {
                    pattern.replace("*", str(number)) for number in range(counts[self.config[name]])
                }
        return len(self.fields.numbered) > before

    def _flip(self, name: str, values: Sequence[tuple[Any, Tensors]]) -> tuple[Any] | None:
        """Return a value of the other truth, if with every such value all layers of a kind change in the same way."""
        flipped = [(value, tensors) for value, tensors in values if bool(value) != bool(self.config[name])]
        if len({tensors for _, tensors in flipped}) != 1:
            return None
        value, tensors = flipped[0]
        if any(after != before and after in self.fields.kinds
               for before, after in zip(self.base.layers, tensors.layers, strict=False)):  # fmt: skip
            return None  # it decides which layers are of which kind
        return (value,) if self._deltas({name: value}, {}, self.base, tensors) is not None else None

    def _deltas(
        self, changes: Mapping[str, Any], others: Mapping[str, Any], before: Tensors, after: Tensors | None
    ) -> _Deltas | None:
        """Return how tensors differ from what is known of these changes, if alike in all layers of a kind."""
        if after is None or len(before.layers) != len(after.layers):
            return None
        outside, kinds = make_entry("", self.fields.table() | _PLAIN).names({**self.config, **others, **changes})
        deltas = {_OUTSIDE: _delta(outside, after.outside)}
        for layer, names in zip(before.layers, after.layers, strict=True):
            kind = self.fields.kinds.index(layer)
            if kind not in kinds or deltas.setdefault(kind, _delta(kinds[kind], names)) != _delta(kinds[kind], names):
                return None  # it changes which layers are of which kind
        return deltas

    def _switch(self, changes: Mapping[str, Any]) -> None:
        """Note which tensors these values add or remove, of kinds of layers and outside, if any."""
        deltas: _Deltas = {}
        for others, before in self.models:
            if changes.keys().isdisjoint(others):
                after = self._try({**others, **changes})
                for kind, delta in (self._deltas(changes, others, before, after) or {}).items():
                    if deltas.setdefault(kind, delta) != delta:
                        self._warn(f"{dict(changes)} changes layers of a kind in several ways")
        if any(map(any, deltas.values())):
            self.fields.switches.append({
                "when": self._conditions(changes),
                "changes": [[kind, *delta] for kind, delta in sorted(deltas.items()) if any(delta)],
            })  # fmt: skip

    def _conditions(self, changes: Mapping[str, Any]) -> list[list[Any]]:
        return [[name, bool(value), bool(self.default.get(name)) == bool(value)] for name, value in changes.items()]

    def _choose_layers(self, name: str, values: Sequence[tuple[Any, Tensors]]) -> None:
        """Add the kinds that layers have for other values of a field.

        A kind with all names of another, and more, is one only for that truth value: damaged layers could pass for it.
        """
        for value, tensors in values:
            new = self._new_kinds(tensors)
            if any(kind < other or other < kind for kind in new for other in self.fields.kinds):
                if bool(value) == bool(self.config[name]):
                    self._warn(f"{name} = {value!r} has layers of kinds that are a part of others")
                    continue
                first = len(self.fields.kinds)
                self.fields.only |= {str(first + at): self._conditions({name: value}) for at in range(len(new))}
            self._add({name: value}, tensors)

    def _warn(self, problem: str) -> None:
        print(f"{self.variants.model_class.__name__}: {problem}", file=sys.stderr)


def _alternatives(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return tuple(other for other in (None, 0, 1, 2, LAYERS - 1, 2 * value) if other != value)
    if isinstance(value, float):
        return (None, 0.0)
    if isinstance(value, list):
        return ([], [0], [1])
    return (True, 1, 2, 16) if value is None else ()


def _count(pattern: str, tensors: Tensors) -> int:
    return sum(_NUMBER.sub("*", name) == pattern for name in tensors.outside)


def _other_layers(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes to a config that may give it layers of other kinds: of each type by each of its lists of types."""
    yield from ({name: value} for name, value in _KINDS if name in config)
    types = {
        name: sorted({*found, *known})
        for name, found in config.items()
        for known in _TYPES
        if isinstance(found, list) and all(isinstance(each, str) for each in found) and not known.isdisjoint(found)
    }
    for chosen in product(*types.values()) if types else ():
        yield {name: [each] * len(config[name]) for name, each in zip(types, chosen, strict=True)}


def _delta(before: Names, after: Names) -> tuple[list[str], list[str]]:
    return sorted(after - before), sorted(before - after)
