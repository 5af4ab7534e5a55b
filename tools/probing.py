"""Configs of an architecture that are drawn, varied and built on the meta device, to see what tensors they make."""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models.shape import Shape
from manifests.models.sizes import flattened
from tools.tiny_models import tiny_config

__all__ = [
    "LAYER_COUNTS",
    "NUMBER",
    "PASSED_OVER",
    "NotFittedError",
    "Prober",
    "Sample",
    "drop_field",
    "nested",
    "set_field",
    "templates",
]

LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Fields that no size depends on.
PASSED_OVER = re.compile(
    r"token_id|^rope_|\.rope_|transformers_version|model_type|architectures|id2label|label2id|dropout|pdrop|_eps$"
    r"|dtype|use_cache|output_|problem_type|chunk_size_feed|tie_word|return_dict|initializer|quantization|per_layer_config"
)
_VARIANTS = 4  # configs with further kinds of layers around which fields are varied
_WIDE = re.compile(r"dim|size|rank|width|hidden|heads|groups|ffn|channels|state|embd|vocab|^d_|inner|positions|ctx")
_EXPERTS = re.compile(r"experts\.\w+$")
_BY_KEYWORD = re.compile(r"kwargs\.(?:pop|get|setdefault)\(\s*[\"'](\w+)[\"'](?:,\s*(\w+))?")
_BY_GETATTR = re.compile(r"getattr\((?:self\.)?config,\s*[\"'](\w+)[\"']")


class NotFittedError(Exception):
    """An architecture whose tensors were not found to follow from its config, and why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A config as it was given, its fields as transformers has them, and its model's tensors."""

    given: Mapping[str, Any]
    fields: Mapping[str, object]
    tensors: Mapping[str, Shape]


class Prober:
    """Builds models of an architecture on the meta device, from configs that it draws."""

    def __init__(self, model_class: type[PreTrainedModel]) -> None:
        self.model_class, self.config_class = model_class, model_class.config_class
        self.random = random.Random(model_class.__name__)
        self.base: dict[str, Any] = plain(tiny_config(model_class).to_dict())
        self.full: Mapping[str, object] = flattened(plain(self.config_class().to_dict()))
        self.hidden: dict[str, Any] = {}
        source = self._source()
        self.hidden = self._hidden(source)
        before = self.fields_of(self.base)
        for name in [name for name, value in self.hidden.items() if value is None]:
            given = copy.deepcopy(self.base)
            set_field(given, name, 3)
            fields = self.fields_of(given)
            if fields is None or before is None or any(fields.get(other) != value for other, value in before.items()):
                del self.hidden[name]  # another name of a field that is kept
        read = set(re.findall(r"(?:config|self)\.(\w+)\b|[\"'](\w+)[\"']", source))
        words = {word for each in read for word in each if word}
        words |= {name for alias, name in self.config_class.attribute_map.items() if alias in words}
        self.flat = {
            name: value for name, value in flattened(self.base).items()
            if name.rpartition(".")[2] in words and not PASSED_OVER.search(name)
        } | self.hidden  # fmt: skip
        first = self.sample(self.base)
        if first is None:
            raise NotFittedError("no tiny model could be built")
        self.first = first
        self.relevant = self._relevant()

    def sample(self, given: Mapping[str, Any], most: int = 0) -> Sample | None:
        """Build a config's model; nothing if transformers refuses the config."""
        try:
            config = self.config_class(**copy.deepcopy(dict(given)))
            with torch.device("meta"):
                model = self.model_class(config)
            state = dict(model.state_dict())
            if most and sum(tensor.shape[0] for name, tensor in state.items() if _EXPERTS.search(name)) > most:
                return None  # each would become tensors of its own
            files = revert_weight_conversion(model, state)
        except Exception:  # whatever it raises of fields that do not go together
            return None
        if any(0 in tensor.shape for tensor in files.values()):
            return None
        fields = flattened(plain(config.to_dict())) | {
            name: value for name, value in flattened(given).items() if name in self.hidden
        }
        return Sample(given, fields, {name: tuple(tensor.shape) for name, tensor in files.items()})

    def fields_of(self, given: Mapping[str, Any]) -> Mapping[str, object] | None:
        """Return a config's fields as transformers has them."""
        try:
            return flattened(plain(self.config_class(**copy.deepcopy(dict(given))).to_dict()))
        except Exception:  # as above
            return None

    def whole(self, sample: Sample) -> Mapping[str, Any]:
        """Return what transformers would write into config.json."""
        return nested(sample.fields)

    def draw(self, omit: float = 0.0) -> Sample | None:
        """Build a model of random values; with a chance of `omit` for each field, without it."""
        for _ in range(6):
            if (found := self.sample(self.draw_config(omit))) is not None:
                return found
        return None

    def draw_config(self, omit: float = 0.0) -> dict[str, Any]:
        given = copy.deepcopy(self.base)
        lists = [name for name in self.flat if self.is_by_layer(name)]
        for name in sorted(self.relevant):
            values = self.relevant[name]
            if name in lists:
                continue
            if name in self.hidden or self.is_of_layers(name):
                if self.random.random() < 0.5:
                    drop_field(given, name)
                else:
                    set_field(given, name, self._other(name))
            elif values and self.random.random() < 0.2:
                set_field(given, name, self.random.choice(values))
            else:
                set_field(given, name, self._other(name))
        for name in lists:
            if self.random.random() < 0.4 and not self.counts_layers(name):
                set_field(given, name, None)
            else:
                set_field(given, name, self._items(name, given))
        for name in sorted(flattened(given)):
            if omit and self.random.random() < omit and name in self.flat and name not in lists:
                drop_field(given, name)
        return given

    def _source(self) -> str:
        """Return the source of the model's modules and of the config class."""
        with torch.device("meta"):
            model = self.model_class(self.config_class(**copy.deepcopy(self.base)))
        modules = sorted({type(part).__module__ for part in model.modules()})
        sources = [inspect.getsource(sys.modules[name]) for name in modules if name.startswith("transformers.models.")]
        kinds = [self.config_class, *getattr(self.config_class, "sub_configs", {}).values()]
        return "\n".join([*sources, *(inspect.getsource(kind) for kind in kinds)])

    def _hidden(self, module: str) -> dict[str, Any]:
        """Return the fields that config classes read and do not keep, with the values of a config that has none."""
        kinds = {"": self.config_class} | {
            f"{part}.": kind
            for part, kind in getattr(self.config_class, "sub_configs", {}).items()
            if part in self.base
        }
        found = {
            f"{prefix}{name}": int(default) if default.isdecimal() else None
            for prefix, kind in kinds.items()
            for name, default in _BY_KEYWORD.findall(inspect.getsource(kind))
            if default.isdecimal() or not default
        }
        known = {**flattened(self.base), **self.config_class.attribute_map}
        found |= {name: None for name in _BY_GETATTR.findall(module) if name not in known}
        return {name: value for name, value in found.items() if not PASSED_OVER.search(name)}

    def _relevant(self) -> dict[str, list[Any]]:
        """Return the fields that matter to names or shapes, with values that change names.

        A field may matter only where another one adds a kind of layer, so those are varied around each such config too.
        """
        found: dict[str, list[Any]] = {}
        bases = [self.first]
        if (derived := self.sample(self._without_lists(self.base))) is not None:
            bases.append(derived)
        known = [frozenset(templates(self.first.tensors))]
        for base in bases:
            for name in self.flat:
                if base is not self.first and name in found:
                    continue
                for other in self._alternatives(name, self.flat[name])[: 3 if base is self.first else 1]:
                    sample = self.sample(self.changed(base.given, name, other))
                    if sample is None or sample.tensors == base.tensors:
                        continue
                    values = found.setdefault(name, [])
                    kinds = frozenset(templates(sample.tensors))
                    if name.rpartition(".")[2] in LAYER_COUNTS:
                        continue
                    if kinds != known[0] or not isinstance(other, int):
                        values.append(other)
                    if any(kinds - each for each in known) and kinds not in known and len(bases) <= _VARIANTS:
                        bases.append(sample)
                        known.append(kinds)
        return found

    def changed(self, given: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
        """Return a config with another value of a field, and without the lists by layer that it would contradict."""
        found = copy.deepcopy(dict(given))
        set_field(found, name, value)
        return self._without_lists(found) if name.rpartition(".")[2] in LAYER_COUNTS else found

    def _without_lists(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = copy.deepcopy(dict(given))
        for known in self.flat:
            if (self.is_by_layer(known) and not self.counts_layers(known)) or self.is_of_layers(known):
                set_field(found, known, None)
        return found

    def _alternatives(self, name: str, value: object) -> list[Any]:
        if isinstance(value, bool):
            return [not value]
        if isinstance(value, int):
            return [self.larger(name, value), 0, None]
        if isinstance(value, float):
            return [value * 2]
        if value is None:
            return [16, 1, True, [1]]
        if isinstance(value, list):
            if self.is_by_layer(name):
                given = copy.deepcopy(self.base)
                return [self._items(name, given) for _ in range(3)]
            return [[1], []]
        if isinstance(value, str):
            hint = self.config_class.__annotations__.get(name)
            return [each for each in typing.get_args(hint) if isinstance(each, str) and each != value]
        return []

    def larger(self, name: str, value: int) -> int:
        return 2 * value if _is_wide(name) and value else value + 1

    def _other(self, name: str) -> Any:
        value = self.flat[name]
        if isinstance(value, bool):
            return self.random.random() < 0.5
        leaf = name.rpartition(".")[2]
        if leaf in LAYER_COUNTS:
            return self.random.randint(2, 7)
        if isinstance(value, int) and "expert" in leaf and not _WIDE.search(leaf):
            return value * self.random.choice((1, 1, 2, 3))
        if isinstance(value, int) and _is_wide(name):
            return value * self.random.choice((1, 2, 3, 5, 7, 9))
        if isinstance(value, int):
            return self.random.choice((0, 1, 1, 2, 2, 3, 4))
        if isinstance(value, float):
            return value * self.random.choice((1, 2, 4))
        if value is None:
            tried = [other for other in self.relevant[name] if other is not None]
            first = tried[0] if tried else 1
            if isinstance(first, list):
                return self._subset()
            if name not in self.hidden and self.random.random() < 0.5:
                return None
            if isinstance(first, bool):
                return True
            return self.random.choice((1, 2, 3, 4)) * (16 if _is_wide(name) else 1)
        if isinstance(value, list):
            return self._subset()
        return value

    def _subset(self) -> list[int]:
        return sorted(self.random.sample(range(6), self.random.randint(0, 3)))

    def count_field(self, name: str) -> str | None:
        prefix = name.rpartition(".")[0]
        names = [f"{prefix}.{leaf}" if prefix else leaf for leaf in LAYER_COUNTS]
        return next((known for known in names if known in self.flat), None)

    def is_by_layer(self, name: str) -> bool:
        value, count = self.flat.get(name), self.count_field(name)
        if not isinstance(value, list) or not value or self.is_of_layers(name):
            return False
        return count is None or len(value) == self.flat[count]

    def is_of_layers(self, name: str) -> bool:
        """Return whether a field lists the numbers of some layers."""
        value = self.flat.get(name)
        return isinstance(value, list) and all(type(item) is int for item in value) and value == sorted(set(value))

    def counts_layers(self, name: str) -> bool:
        return self.count_field(name) is None

    def _items(self, name: str, given: Mapping[str, Any]) -> list[Any]:
        known: Any = self.flat[name]
        others: Any = self.full.get(name) or []
        items = sorted({*known, *(others if isinstance(others, list) else ())}, key=str)
        if all(isinstance(item, int) for item in items):
            items = sorted({*items, *(item * 2 for item in items)})
        counted = self.count_field(name)
        count = flattened(given).get(counted) if counted else self.random.randint(2, 7)
        return [self.random.choice(items) for _ in range(count if isinstance(count, int) else len(known))]


def _is_wide(name: str) -> bool:
    return bool(_WIDE.search(name.rpartition(".")[2]))


def templates(tensors: Mapping[str, Shape]) -> dict[str, dict[int, tuple[Shape, tuple[int, ...]]]]:
    """Return, by names with `*` for numbers: by the first number, the shape, and how many each other number is."""
    found: dict[str, dict[int, tuple[Shape, tuple[int, ...]]]] = {}
    for name, shape in tensors.items():
        numbers = [int(number) for number in NUMBER.findall(name)]
        at = found.setdefault(NUMBER.sub("*", name), {})
        layer = numbers[0] if numbers else 0
        others = tuple(number + 1 for number in numbers[1:])
        known = at.get(layer, (shape, others))[1]
        at[layer] = shape, tuple(map(max, known, others)) if others else ()
    return found


def plain(document: Mapping[str, Any]) -> dict[str, Any]:
    left = ("architectures", "transformers_version", "_name_or_path", "dtype", "id2label", "label2id")
    return {
        name: plain(value) if isinstance(value, Mapping) and name.endswith("_config") else copy.deepcopy(value)
        for name, value in document.items()
        if name not in left
    }


def set_field(given: dict[str, Any], name: str, value: object) -> None:
    *path, leaf = name.split(".")
    for word in path:
        given = given.setdefault(word, {})
    given[leaf] = copy.deepcopy(value)


def drop_field(given: dict[str, Any], name: str) -> None:
    *path, leaf = name.split(".")
    for word in path:
        given = given.get(word, {})
    given.pop(leaf, None)


def nested(fields: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        set_field(found, name, value)
    return found
