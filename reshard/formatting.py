"""Sizes and counts as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

__all__ = ["number_runs", "parse_numbers", "show_bytes", "show_count", "show_numbers"]

_MOST_RUNS = 8


def show_bytes(nbytes: int) -> str:
    """Give a size in the unit that leaves one to four digits before the point."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"


def show_count(count: float) -> str:
    """Give a count with three digits: `1.12 G`."""
    unit = ""
    for larger in ("k", "M", "G", "T", "P"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    digits = 0 if not unit and count == int(count) else max(0, 3 - len(str(int(count))))
    return f"{count:.{digits}f} {unit}".rstrip()


def show_numbers(numbers: Iterable[int]) -> str:
    """Shorten rising numbers: `0-2, 5`. Of many pieces only the first are named."""
    listed = list(numbers)
    runs = [str(first) if first == last else f"{first}-{last}" for first, last in number_runs(listed)]
    if len(runs) > _MOST_RUNS:
        runs = [*runs[: _MOST_RUNS - 1], f"... ({len(listed)} in all)"]
    return ", ".join(runs)


def parse_numbers(text: str) -> frozenset[int] | None:
    """Read `0-2, 5`: rising runs, in any order. None when it is no such thing."""
    numbers: set[int] = set()
    for piece in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", piece)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            return None
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(numbers)


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Give the first and last of each run of rising numbers without gaps."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append((members[0], members[-1]))
    return runs
