"""The formulas of one architecture: what sizes, numbers and layers follow from which fields of its config."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from manifests.models.sizes import Fields, Sizes, flattened, size
from tools.fitting import Row, fit_condition, fit_size, literals
from tools.probing import (
    PASSED_OVER,
    NotFittedError,
    Prober,
    Sample,
    drop_field,
    nested,
    set_field,
    templates,
)

__all__ = ["Fitter"]

_BASES, _DRAWS = 6, 50


class Fitter:
    """Finds the formulas of one architecture."""

    def __init__(self, prober: Prober) -> None:
        self.prober = prober
        self.samples: list[Sample] = []
        self.pairs: list[tuple[int, int, str]] = []  # samples that differ in one field
        self._conditions: dict[tuple[int, int], str | None] = {}
        self._formulas: dict[tuple[Any, ...], str | None] = {}
        self._literals: dict[tuple[int, ...], dict[str, int]] = {}
        self._splits: list[str] = []  # conditions that distinguish shapes of a name

    def table(self) -> dict[str, Any]:
        self._draw()
        self.counts = self._counts()
        cases: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
        often = Counter(name for seen in self.seen for name in seen)
        for template in sorted(often, key=lambda name: (-often[name], name)):
            for key in self._cases(template):
                cases.setdefault(key, []).append(template)
        groups = []
        for (when, numbers, shape), names in cases.items():
            group: dict[str, Any] = {"names": names, "shape": list(shape)}
            group |= {"numbers": list(numbers)} if numbers else {}
            groups.append(group | ({"when": when} if when else {}))
        used = {name for key in cases for text in (key[0], *key[1], *key[2]) for name in _names(text)}
        table: dict[str, Any] = {"groups": groups}
        return table | self._meanings(used)

    def _draw(self) -> None:
        """Draw configs, and beside each of some others that differ from it in one field."""
        prober = self.prober
        self.samples.append(prober.first)
        for number in range(_BASES + _DRAWS):
            base = prober.first if number == 0 else prober.draw()
            if base is None:
                continue
            if number:
                self.samples.append(base)
            if number > _BASES:
                continue
            at = len(self.samples) - 1
            for name in prober.relevant:
                value = flattened(base.given).get(name, prober.hidden.get(name))
                if not isinstance(value, (int, float)) or isinstance(value, bool) or prober.is_by_layer(name):
                    continue
                other_value = prober.larger(name, value) if isinstance(value, int) else value * 2
                given = prober.changed(base.given, name, other_value)
                if (other := prober.sample(given)) is not None:
                    self.pairs.append((at, len(self.samples), name))
                    self.samples.append(other)
        if len(self.samples) < 12:
            raise NotFittedError("too few of its configs could be built")
        meant = dict(prober.hidden)
        sizes = Sizes(groups=(), absent=meant, null=meant)
        self.fields = [Fields(sizes, nested(sample.fields), "") for sample in self.samples]
        self.known = {
            name: None for name in prober.relevant if all(_has(fields, name) for fields in self.fields)
        }  # fmt: skip
        self.seen = [templates(sample.tensors) for sample in self.samples]

    def _counts(self) -> dict[str, tuple[str, list[int]]]:
        """Return, for each list of modules, how many they are: as a formula, and in each sample."""
        found = {}
        for prefix in sorted({name.partition("*")[0] for seen in self.seen for name in seen if "*" in name}):
            values = [
                max(
                    (layer + 1 for name, at in seen.items() if name.startswith(f"{prefix}*") for layer in at), default=0
                )
                for seen in self.seen
            ]
            rows = [Row(fields, 0) for fields in self.fields]
            formula = self._size(values, rows, [values[one] != values[other] for one, other, _ in self.pairs])
            if formula is None:
                formula = next(
                    (f"#{name}" for name in self.known
                     if all(fields.length(name) == value for fields, value in zip(self.fields, values, strict=True))),
                    None,
                )  # fmt: skip
            if formula is None:
                raise NotFittedError(f"the number of {prefix}* does not follow from fields of the config")
            found[prefix] = (formula, values)
        return found

    def _cases(self, template: str) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Yield the condition, the numbers and the shape of each case of a name."""
        counts = [1] * len(self.samples)
        numbers: tuple[str, ...] = ()
        if "*" in template:
            formula, counts = self.counts[template.partition("*")[0]]
            numbers = (formula,)
        rows, places = [], []
        for index, count in enumerate(counts):
            for layer in range(count):
                rows.append(Row(self.fields[index], layer))
                places.append((index, layer))
        bits = sum(1 << at for at, (index, layer) in enumerate(places) if layer in self.seen[index].get(template, {}))
        key = tuple(counts)
        if key not in self._literals:
            self._literals[key] = literals(rows, self.known)
        known = self._literals[key]
        when = self._condition(bits, len(rows), known, template)
        present = [at for at in range(len(rows)) if bits >> at & 1]
        yield from self._shapes(template, rows, places, present, when, numbers, known)

    def _condition(self, bits: int, count: int, known: Mapping[str, int], template: str) -> str:
        if (bits, count) not in self._conditions:
            self._conditions[bits, count] = fit_condition(bits, count, known)
        found = self._conditions[bits, count]
        if found is None:
            raise NotFittedError(f"in which layers {template} is does not follow from fields of the config")
        return found

    def _shapes(
        self, template: str, rows: Sequence[Row], places: Sequence[tuple[int, int]], present: Sequence[int], when: str,
        numbers: tuple[str, ...], known: Mapping[str, int], depth: int = 0,
    ) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:  # fmt: skip
        observed = [self.seen[places[at][0]][template][places[at][1]] for at in present]
        here = [rows[at] for at in present]
        if len({tuple(map(len, each)) for each in observed}) == 1:
            sizes = []
            for which in (0, 1):
                for place in range(len(observed[0][which])):
                    values = [each[which][place] for each in observed]
                    sizes.append(self._size(values, here, self._changes(template, which, place)))
            if None not in sizes:
                found = [text for text in sizes if text is not None]
                dims = len(observed[0][0])
                yield when, (*numbers, *found[dims:]), tuple(found[:dims])
                return
        if depth < 2:
            names = {
                name for which in (0, 1) for place in range(len(observed[0][which]))
                for (_, _, name), is_changed in zip(self.pairs, self._changes(template, which, place), strict=True)
                if is_changed
            }  # fmt: skip
            first = [*self._splits, *(words for words in known if not names.isdisjoint(_names(words))), *known]
            for words, bits in ((words, known[words]) for words in dict.fromkeys(first) if words in known):
                inside = [at for at in present if bits >> at & 1]
                outside = [at for at in present if not bits >> at & 1]
                if min(len(inside), len(outside)) < 6 or words.startswith("not "):
                    continue
                try:
                    parts = []
                    for side, chosen in ((words, inside), (f"not {words}", outside)):
                        joined = " | ".join(f"{each} & {side}" if each else side for each in when.split(" | "))
                        parts += list(
                            self._shapes(
                                template, rows, places, chosen, joined, numbers, known, depth + 1 if depth else 2
                            )
                        )
                except NotFittedError:
                    continue
                self._splits.append(words)
                yield from parts
                return
        raise NotFittedError(f"the shape of {template} does not follow from fields of the config")

    def _changes(self, template: str, which: int, place: int) -> list[bool]:
        """Return for each pair of samples whether a size of a name differs."""
        found = []
        for one, other, _ in self.pairs:
            values = []
            for index in (one, other):
                at = self.seen[index].get(template, {})
                values.append([each[which][place] for each in at.values() if len(each[which]) > place])
            found.append(bool(values[0] and values[1]) and values[0][0] != values[1][0])
        return found

    def _size(self, values: Sequence[int], rows: Sequence[Row], changes: Sequence[bool]) -> str | None:
        names = {name for (_, _, name), changed in zip(self.pairs, changes, strict=True) if changed}
        by_layer = {
            name for name in self.known if self.prober.is_by_layer(name) and isinstance(self.prober.flat[name][0], int)
        }  # type: ignore[index]
        names &= set(self.known)
        key = (tuple(values), tuple(sorted(names)), tuple((id(row.fields), row.layer) for row in rows))
        if key not in self._formulas:
            texts = [text for text in dict.fromkeys(self._formulas.values()) if text and not text.isdecimal()]
            found = None
            if max(values) > 4:  # what other names' sizes are is likelier than what these few rows allow
                found = next((text for text in texts if _gives(text, values, rows)), None)
            if found is None:
                found = fit_size(values, rows, names) if len(names) <= 6 else None
            if found is None and by_layer:
                found = fit_size(values, rows, names | by_layer)
            self._formulas[key] = found
        return self._formulas[key]

    def _meanings(self, used: set[str]) -> dict[str, Any]:
        """Return what configs mean that lack fields, for those that are used and those that these follow from."""
        absent: dict[str, Any] = {}
        null: dict[str, Any] = {}
        pending = sorted(used)
        while pending:
            name = pending.pop()
            if name in absent:
                continue
            if name in self.prober.hidden:
                absent[name] = null[name] = self.prober.hidden[name]
                continue
            for found, value in ((absent, _ABSENT), (null, None)):
                try:
                    meant = self._meaning(name, value)
                except NotFittedError:
                    continue
                if found is absent or meant is not None:
                    found[name] = meant
                texts: Iterable[str] = ()
                if isinstance(meant, dict):
                    texts = [
                        meant.get("size", ""),
                        meant.get("count", ""),
                        meant.get("layers", ""),
                        *(when for _, when in meant.get("items", ())),
                    ]
                pending += sorted({other for text in texts for other in _names(text)} - set(absent))
        aliases = self._aliases({*used, *absent})
        return {
            **({"aliases": aliases} if aliases else {}),
            "absent": {name: absent[name] for name in sorted(absent)},
            "null": {name: null[name] for name in sorted(null)},
        }

    def _aliases(self, names: set[str]) -> dict[str, str]:
        aliases: Mapping[str, str] = self.prober.config_class.attribute_map
        found = {alias: name for alias, name in aliases.items() if name in names and alias != name}
        for prefix, kind in getattr(self.prober.config_class, "sub_configs", {}).items():
            for alias, name in getattr(kind, "attribute_map", {}).items():
                if f"{prefix}.{name}" in names:
                    found[f"{prefix}.{alias}"] = f"{prefix}.{name}"
        return dict(sorted(found.items()))

    def _meaning(self, name: str, value: object) -> Any:
        """Return what a config means that has no field of a name, or null there."""
        prober, seen = self.prober, []
        for number in range(40):
            given = prober.draw_config()
            _put(given, name, value)
            if (fields := prober.fields_of(given)) is not None and name in fields:
                seen.append((given, fields))
            if number == 7 and not seen:
                break
        if not seen:
            raise NotFittedError(f"{name} must be given")
        values = [fields[name] for _, fields in seen]
        if all(each == values[0] and type(each) is type(values[0]) for each in values):
            return values[0]
        sizes = Sizes(groups=(), absent=prober.hidden, null=prober.hidden)
        hidden = [
            {known: value for known, value in flattened(given).items() if known in prober.hidden} for given, _ in seen
        ]
        fields = [Fields(sizes, nested({**each, **more}), "") for (_, each), more in zip(seen, hidden, strict=True)]
        if all(isinstance(each, int) and not isinstance(each, bool) for each in values):
            names = self._followed(name, seen[:3])
            found = fit_size(values, [Row(each, 0) for each in fields], names)  # type: ignore[arg-type]
            if found is not None and name not in _names(found):
                return {"size": found}
        if all(isinstance(each, list) for each in values):
            lists: Any = values
            return (self._layers_meant if prober.is_of_layers(name) else self._items_meant)(name, lists, fields)
        raise NotFittedError(f"{name} must be given")

    def _followed(self, name: str, seen: Sequence[tuple[dict[str, Any], Mapping[str, object]]]) -> set[str]:
        """Return the fields that another follows from, where a config lacks it."""
        names = set()
        for given, fields in seen:
            for other, known in flattened(given).items():
                if isinstance(known, int) and not isinstance(known, bool) and not PASSED_OVER.search(other):
                    changed = copy.deepcopy(given)
                    set_field(changed, other, self.prober.larger(other, known))
                    if (others := self.prober.fields_of(changed)) is not None and others.get(name) != fields[name]:
                        names.add(other)
        return names

    def _items_meant(self, name: str, values: Sequence[list[Any]], fields: Sequence[Fields]) -> dict[str, Any]:
        count = self.prober.count_field(name)
        if count is None or any(len(each) != one.number(count, 0) for each, one in zip(values, fields, strict=True)):
            raise NotFittedError(f"{name} must be given")
        rows = [Row(one, layer) for each, one in zip(values, fields, strict=True) for layer in range(len(each))]
        items = [item for each in values for item in each]
        known = self._literals_but(name, rows, fields)
        found = []
        for item in sorted(set(items), key=lambda each: (items.count(each), str(each))):
            when = fit_condition(sum(1 << at for at, each in enumerate(items) if each == item), len(rows), known)
            if when is None:
                raise NotFittedError(f"{name} must be given")
            found.append([item, when])
        return {"count": count, "items": found}

    def _layers_meant(self, name: str, values: Sequence[list[int]], fields: Sequence[Fields]) -> dict[str, Any]:
        count = self.prober.count_field(name)
        if count is None:
            raise NotFittedError(f"{name} must be given")
        rows = [Row(one, layer) for one in fields for layer in range(int(one.number(count, 0)))]
        bits, at = 0, 0
        for each, one in zip(values, fields, strict=True):
            bits |= sum(1 << (at + layer) for layer in each)
            at += int(one.number(count, 0))
        when = fit_condition(bits, len(rows), self._literals_but(name, rows, fields)) if bits < 1 << at else None
        if when is None:
            raise NotFittedError(f"{name} must be given")
        return {"count": count, "layers": when}

    def _literals_but(self, name: str, rows: Sequence[Row], fields: Sequence[Fields]) -> dict[str, int]:
        candidates = {**self.prober.relevant, **self.prober.hidden, **dict.fromkeys(self._small())}
        beside = ("", name.rpartition(".")[0])  # not the fields of another part's config
        others = {
            known: None for known in candidates
            if known != name and known.rpartition(".")[0] in beside and not self.prober.is_by_layer(known)
            and not self.prober.is_of_layers(known) and all(_has(one, known) for one in fields)
        }  # fmt: skip
        return literals(rows, others)

    def _small(self) -> list[str]:
        return [name for name, value in self.prober.flat.items() if type(value) is int and value < 16]


_ABSENT = object()


def _gives(text: str, values: Sequence[int], rows: Sequence[Row]) -> bool:
    return all(size(text, row.fields, row.layer) == value for value, row in zip(values, rows, strict=True))


def _put(given: dict[str, Any], name: str, value: object) -> None:
    if value is _ABSENT:
        drop_field(given, name)
    else:
        set_field(given, name, value)


def _has(fields: Fields, name: str) -> bool:
    try:
        fields.value(name)
    except Exception:
        return False
    return True


def _names(text: str) -> set[str]:
    """Return the fields that a formula or a condition names."""
    found = set()
    for part in re.split(r" [|&+] ", text):
        words = part.removeprefix("not ").split(" ")
        if len(words) == 1:
            found |= set(re.findall(r"[A-Za-z_][\w.]*", part.removeprefix("not ")))
        elif words[:2] == ["layer", "="]:
            continue
        elif words[0] == "layer":
            found |= {words[2], *words[4:]}
        else:
            found.add(words[0])
    return found
