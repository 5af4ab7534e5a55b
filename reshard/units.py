"""Sizes and counts as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import groupby

__all__ = ["parse_bytes", "show_bytes", "show_count", "show_numbers"]

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int | None:
    """Read `80GB`, `75 GiB` or `1000`: whole bytes, above 0. None for anything else."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGT]?)(i)?B?", text, re.IGNORECASE)
    if not found:
        return None
    unit: int = (1024 if found[3] else 1000) ** _POWERS[found[2].upper()]
    return int(Fraction(found[1]) * unit) or None


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
    """Shorten rising numbers: `0-2, 5`."""
    shown = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        shown.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(shown)
