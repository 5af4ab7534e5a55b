"""Find formulas of config fields that give observed numbers, and conditions that tell in which layers a tensor is.

The languages are those of `manifests.models.sizes`, whose own evaluator computes every candidate: what is found here is
what `reshard plan` will compute.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import numpy as np

from manifests.models.sizes import Fields, holds, size

__all__ = ["Row", "fit_condition", "fit_size", "literals"]

_MOST_TERMS = 3
_MOST_SUMS = 200_000
_SPARE = 3  # observations beyond those that a formula's weights follow from
_DIVISORS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """One observation: a layer of a model of a config."""

    fields: Fields
    layer: int


def fit_size(values: Sequence[int], rows: Sequence[Row], names: Collection[str]) -> str | None:
    """Return a size of these fields that has these values in these rows, or nothing if none was found."""
    if len(set(values)) == 1:
        return str(values[0])
    kept = _distinct(values, rows, names)
    target = np.array([values[index] for index in kept], dtype=float)
    rows = [rows[index] for index in kept]
    plain = sorted(names)
    if found := _sum_of_products(target, rows, plain, most_factors=3, most_terms=_MOST_TERMS):
        return found
    divided = [f"{one}//{other}" for one in plain for other in (*plain, *_DIVISORS) if one != other]
    divided += [f"{one}^16" for one in plain]
    divisors = {name for name in plain if all(row.fields.number(name, row.layer) for row in rows)}
    divided = [atom for atom in divided if atom.partition("//")[2] in {"", *divisors, *map(str, _DIVISORS)}]
    return _sum_of_products(target, rows, [*plain, *divided], most_factors=2, most_terms=2)


def _distinct(values: Sequence[int], rows: Sequence[Row], names: Collection[str]) -> list[int]:
    found: dict[object, int] = {}
    for index, row in enumerate(rows):
        key = (values[index], *(row.fields.number(name, row.layer) for name in sorted(names)))
        found.setdefault(key, index)
    return list(found.values())


def _sum_of_products(
    target: np.ndarray, rows: Sequence[Row], atoms: Sequence[str], most_factors: int, most_terms: int
) -> str | None:
    single = {atom: np.array([float(size_of(atom, row)) for row in rows]) for atom in atoms}
    columns = {"1": np.ones(len(rows))}
    for count in range(1, most_factors + 1):
        choose = combinations_with_replacement if count == 2 or len(atoms) <= 4 else combinations
        for chosen in choose(atoms, count):
            columns["*".join(chosen)] = np.trunc(np.prod([single[atom] for atom in chosen], axis=0))
    terms = [term for term, column in columns.items() if column.any()]
    if not terms:
        return None
    table = np.stack([columns[term] for term in terms], axis=1)
    for count in range(1, most_terms + 1):
        if len(rows) < count + _SPARE or len(terms) ** count > _MOST_SUMS:
            break  # any few numbers are the sum of as many products
        if found := _weights(target, table, count):
            return " + ".join(_term(weight, terms[place]) for place, weight in found)
    return None


def size_of(atom: str, row: Row) -> int | float:
    """Return a factor's value: an integer, unless the field has a fraction."""
    return (
        row.fields.number(atom, row.layer)
        if re.fullmatch(r"[A-Za-z_][\w.]*", atom)
        else size(atom, row.fields, row.layer)
    )


def _weights(target: np.ndarray, table: np.ndarray, count: int) -> list[tuple[int, int]] | None:
    """Return columns of the table, and whole numbers to multiply them by, whose sum is the target."""
    chosen = np.array(list(combinations(range(table.shape[1]), count)))
    if not len(chosen):
        return None
    for first in range(3):  # of other rows, where some cannot tell columns apart
        picked = np.linspace(first, len(target) - 1, count).astype(int)
        matrices = table[picked][:, chosen].transpose(1, 0, 2)
        solvable = np.abs(np.linalg.det(matrices)) > 1e-6
        if not solvable.any():
            continue
        weights = np.linalg.solve(
            matrices[solvable], np.broadcast_to(target[picked], (solvable.sum(), count))[..., None]
        )
        whole = np.round(weights[..., 0])
        sums = np.zeros((len(whole), len(target)))
        for place in range(count):
            sums += whole[:, place, None] * table.T[chosen[solvable][:, place]]
        for at in np.flatnonzero((sums == target).all(axis=1) & (np.abs(whole) >= 1).all(axis=1)):
            return [(int(column), int(weight)) for column, weight in zip(chosen[solvable][at], whole[at], strict=True)]
    return None


def _term(weight: int, term: str) -> str:
    if term == "1":
        return str(weight)
    return term if weight == 1 else f"{weight}*{term}"


def literals(rows: Sequence[Row], known: Mapping[str, object]) -> dict[str, int]:
    """Return conditions on these fields, each with the rows where it is true, as bits; of equal ones, the first."""
    found: dict[int, str] = {}
    everywhere = (1 << len(rows)) - 1
    for words in _candidates(rows, known):
        bits = sum(1 << index for index, row in enumerate(rows) if holds(words, row.fields, row.layer))
        if bits not in (0, everywhere):
            found.setdefault(bits, words)
            found.setdefault(everywhere ^ bits, f"not {words}")
    return {words: bits for bits, words in found.items()}


def _candidates(rows: Sequence[Row], known: Mapping[str, object]) -> Iterator[str]:
    values = {name: [row.fields.value(name) for row in rows] for name in known}
    numbers = []
    for name, found in values.items():
        items = {item for value in found if isinstance(value, list) for item in value}
        yield from (f"{name} = {item}" for item in sorted(map(str, items)))
        yield from (f"{name} = {item}" for item in sorted({value for value in found if isinstance(value, str)}))
    for name, found in values.items():
        yield name
        if any(isinstance(value, list) and all(isinstance(item, int) for item in value) for value in found):
            yield f"layer in {name}"
        if all(isinstance(value, int) or value is None for value in found):
            numbers.append(name)
    for name in numbers:
        if max(value or 0 for value in values[name]) < 16:  # type: ignore[type-var, operator]
            yield f"layer < {name}"
            yield f"{name} divides layer+1"
            yield f"{name} divides layer"
            yield from (f"layer % {name} = {other}" for other in numbers if other != name)
    yield "layer = 0"


def fit_condition(wanted: int, rows: int, known: Mapping[str, int]) -> str | None:
    """Return conditions that are true in exactly the rows of the bits `wanted`, or nothing if none were found."""
    everywhere = (1 << rows) - 1
    if wanted == everywhere:
        return ""
    terms: list[tuple[int, str]] = []
    for count in (1, 2, 3):
        for chosen in combinations(known, count):
            bits = everywhere
            for words in chosen:
                bits &= known[words]
            if bits == wanted:
                return " & ".join(chosen)
            if bits and not bits & ~wanted:
                terms.append((bits, " & ".join(chosen)))
        for several in (2, 3):
            if several == 3 and len(terms) > 60:
                break
            for joined in combinations(terms[:400], several):
                bits = 0
                for each, _ in joined:
                    bits |= each
                if bits == wanted:
                    return " | ".join(words for _, words in joined)
    return None
