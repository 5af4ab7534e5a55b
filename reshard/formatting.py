"""Formats counts and lists of numbers, and parses such lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

_MOST_RUNS = 8


def show_count(count: float) -> str:
    """Return a count with three digits: `1.12 G`."""
    unit = ""
    for larger in ("k", "M", "G", "T", "P"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    digits = 0 if not unit and count == int(count) else max(0, 3 - len(str(int(count))))
    return f"{count:.{digits}f} {unit}".rstrip()


def show_numbers(numbers: Iterable[int]) -> str:
    """Return rising numbers as ranges: `0-2, 5`. Of many ranges only the first are listed."""
    listed = list(numbers)
    runs = [str(first) if first == last else f"{first}-{last}" for first, last in number_runs(listed)]
    if len(runs) > _MOST_RUNS:
        runs = [*runs[: _MOST_RUNS - 1], f"... ({len(listed)} in all)"]
    return ", ".join(runs)


def parse_numbers(text: str) -> frozenset[int] | None:
    """Parse `0-2, 5`: rising ranges, in any order. None if the text is anything else."""
    numbers: set[int] = set()
    for piece in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", piece)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            return None
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(numbers)


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run without gaps."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append((members[0], members[-1]))
    return runs
