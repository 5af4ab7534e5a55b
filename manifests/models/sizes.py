"""The tensors of a catalogue's architecture by its config alone: formulas of config fields, found by `make catalogue`.

`sizes.json` has for each architecture groups of names that share a shape. A name has `*` for each number in it. Three
small languages describe them:

- A size is a sum of products: `2*linear_num_key_heads*linear_key_head_dim + hidden_size`. A factor is an integer, a
  field, or `field//other`, rounded down; `field^16` is divided by 16 and rounded up; `#field` is a list's length. A
  field with a value for each layer is that layer's.
- A condition holds for a layer, counted from 0: `field` (neither null, false nor 0), `field = value` (of a list: the
  layer's item), `layer < field`, `layer in field`, `layer = 2`, `field divides layer+1`, `layer % field = other`;
  each may be negated by `not`. Conditions are joined by ` & `, and those by ` | `.
- What a config means that lacks a field, or has null for it: a value, a size, or conditions for each item of a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from manifests.errors import InputError, ModelError
from manifests.models.config import MAX_LAYERS
from manifests.models.shape import Shape

__all__ = ["Fields", "Group", "Sizes", "filled", "holds", "make_sizes", "size", "sizes_of", "tensors_of"]

_PATH = Path(__file__).with_name("sizes.json")
_MOST_TENSORS = 2_000_000
_MOST_WIDE = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tensors of the same shape, in the layers for which `when` is true."""

    names: tuple[str, ...]
    shape: tuple[str, ...]
    numbers: tuple[str, ...] = ()  # how many numbers each `*` stands for
    when: str = ""  # nothing: always


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What `sizes.json` says of an architecture."""

    groups: tuple[Group, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of fields, and the names used here
    absent: Mapping[str, Any] = field(default_factory=dict)  # what a config means that lacks a field
    null: Mapping[str, Any] = field(default_factory=dict)  # and one that has null for it, where that differs


def sizes_of(architecture: str) -> Sizes | None:
    """Return an architecture's sizes, if they are known."""
    found = _table()["architectures"].get(architecture)
    return None if found is None else make_sizes(found)


def make_sizes(table: Mapping[str, Any]) -> Sizes:
    """Return what a table of `sizes.json` says."""
    groups = []
    for group in table["groups"]:
        fields: dict[str, Any] = {name: found if name == "when" else tuple(found) for name, found in group.items()}
        groups.append(Group(**fields))
    return Sizes(**{**table, "groups": tuple(groups)})


def tensors_of(sizes: Sizes, config: Mapping[str, object], where: str) -> dict[str, Shape]:
    """Return every tensor that files of a config's model have, with its shape.

    Raises:
        ModelError: a field is missing that has no default, has a value of another kind, or makes a model too large.
    """
    fields = Fields(sizes, config, where)
    found: dict[str, Shape] = {}
    for group in sizes.groups:
        for numbers, shape in _instances(group, fields):
            for name in group.names:
                found[_numbered(name, numbers)] = shape
        if len(found) > _MOST_TENSORS:
            problem = f"expected at most {_MOST_TENSORS} tensors, found more"
            raise ModelError(where, problem, code="config.too-large")
    return found


def filled(sizes: Sizes, config: Mapping[str, object], where: str) -> dict[str, object]:
    """Return a config with what it means by the fields that it lacks, as far as tensors depend on them.

    Raises:
        ModelError: a value that such a field follows from is none.
    """
    fields, found = Fields(sizes, config, where), dict(config)
    for name in sizes.absent:
        section, _, leaf = name.rpartition(".")
        inner = found.get(section, {}) if section else found
        if (value := fields.value(name)) is not None and isinstance(inner, Mapping):
            inner = {**inner, leaf: value}
            found = {**found, section: inner} if section else inner
    return found


def _instances(group: Group, fields: Fields) -> Iterator[tuple[tuple[int, ...], Shape]]:
    """Yield the numbers of each tensor of a name of the group, and its shape."""
    if not group.numbers:
        if holds(group.when, fields, 0):
            yield (), _shape(group, fields, 0)
        return
    counts = [fields.count(expression) for expression in group.numbers]
    for layer in range(counts[0]):
        if holds(group.when, fields, layer):
            shape = _shape(group, fields, layer)
            for others in product(*map(range, counts[1:])):
                yield (layer, *others), shape


def _shape(group: Group, fields: Fields, layer: int) -> Shape:
    found = []
    for expression in group.shape:
        number = size(expression, fields, layer)
        if not 0 < number <= _MOST_WIDE:
            problem = f"expected a positive size of {group.names[0]}, found {expression} = {number}"
            raise ModelError(fields.where, problem, code="config.inconsistent-fields")
        found.append(number)
    return tuple(found)


def _numbered(name: str, numbers: Sequence[int]) -> str:
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


class Fields:
    """A config's fields by their names in `sizes.json`, with what it means by those it lacks.

    Fields of an object in the config are written `object.field`.
    """

    def __init__(self, sizes: Sizes, config: Mapping[str, object], where: str) -> None:
        self.where, self._sizes = where, sizes
        self._found = flattened(config)
        for alias, name in sizes.aliases.items():
            if alias in self._found and name not in self._found:
                self._found[name] = self._found[alias]
        self._pending: set[str] = set()

    def value(self, name: str) -> object:
        """Return a field's value."""
        if name in self._found and (self._found[name] is not None or name not in self._sizes.null):
            return self._found[name]
        if name in self._pending or name not in self._sizes.absent:
            raise self._problem(name, "nothing")
        self._pending.add(name)
        meant = (self._sizes.null if name in self._found else self._sizes.absent).get(name)
        self._found[name] = found = self._meant(name, meant)
        self._pending.discard(name)
        return found

    def number(self, name: str, layer: int) -> int | float:
        """Return the number that a field has for a layer; null is 0."""
        found = self.value(name)
        if isinstance(found, list):
            found = found[layer] if layer < len(found) else None
        if isinstance(found, bool) or found is None:
            return int(found or 0)
        if not isinstance(found, (int, float)) or abs(found) > _MOST_WIDE:
            raise self._problem(name, repr(found)[:80])
        return found

    def length(self, name: str) -> int:
        found = self.value(name)
        return len(found) if isinstance(found, (list, str)) else 0

    def count(self, expression: str) -> int:
        """Return how many layers, experts or the like there are."""
        found = size(expression, self, 0)
        if not 0 <= found <= MAX_LAYERS:
            problem = f"expected at most {MAX_LAYERS}, found {found}"
            raise ModelError(f"{self.where}: {expression}", problem, code="config.too-large")
        return found

    def _meant(self, name: str, meant: Any) -> object:
        if isinstance(meant, Mapping) and "size" in meant:
            return size(meant["size"], self, 0)
        if isinstance(meant, Mapping) and "layers" in meant:
            return [layer for layer in range(self.count(meant["count"])) if holds(meant["layers"], self, layer)]
        if isinstance(meant, Mapping) and "items" in meant:
            count = self.count(meant["count"])
            return [
                next((item for item, when in meant["items"] if holds(when, self, layer)), None)
                for layer in range(count)
            ]
        return meant

    def _problem(self, name: str, found: str) -> InputError:
        problem = f"expected a number that sizes of tensors follow from, found {found}"
        return ModelError(f"{self.where}: {name}", problem, code="config.invalid-field")


def flattened(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the fields of a config and of the objects in it."""
    found: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            if prefix.count(".") < 3:
                found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def size(expression: str, fields: Fields, layer: int) -> int:
    """Return what a size is for a layer."""
    return sum(_product(term, fields, layer) for term in expression.split(" + "))


def _product(term: str, fields: Fields, layer: int) -> int:
    found: int | float = 1
    for factor in term.split("*"):
        found *= _factor(factor, fields, layer)
    return int(found)


def _factor(factor: str, fields: Fields, layer: int) -> int | float:
    if factor.lstrip("-").isdecimal():
        return int(factor)
    if factor.startswith("#"):
        return fields.length(factor[1:])
    above, rounding, below = factor.partition("//")
    if rounding:
        return _factor(above, fields, layer) // (_factor(below, fields, layer) or 1)
    above, rounding, below = factor.partition("^")
    if rounding:
        return -(-_factor(above, fields, layer) // int(below))
    return fields.number(factor, layer)


def holds(when: str, fields: Fields, layer: int) -> bool:
    """Return whether conditions hold for a layer."""
    if not when:
        return True
    return any(all(_condition(one, fields, layer) for one in each.split(" & ")) for each in when.split(" | "))


def _condition(words: str, fields: Fields, layer: int) -> bool:
    if words.startswith("not "):
        return not _condition(words[4:], fields, layer)
    match words.split(" "):
        case [name]:
            return bool(fields.value(name))
        case ["layer", "<", name]:
            return layer < fields.number(name, layer)
        case ["layer", "in", name]:
            listed = fields.value(name)
            return isinstance(listed, list) and layer in listed
        case ["layer", "=", number]:
            return layer == int(number)
        case [name, "divides", shifted]:
            period = fields.number(name, layer)
            return bool(period) and (layer + (shifted != "layer")) % period == 0
        case ["layer", "%", name, "=", other]:
            period = fields.number(name, layer)
            return bool(period) and layer % period == fields.number(other, layer)
        case [name, "=", *value]:
            found = fields.value(name)
            if isinstance(found, (list, str)) and not (isinstance(found, str) and found == " ".join(value)):
                found = found[layer] if layer < len(found) else None
            return str(found) == " ".join(value)
        case _:
            raise AssertionError(words)


@cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_PATH.read_text())
    return found
