"""Memory sizes as people write them: K, M, G and T are powers of 1024 everywhere.

An "80 GB" GPU has 80 GiB, so 80GB, 80GiB and 80G are the same here.
"""

from __future__ import annotations

import re

from manifests.errors import UsageError

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LEAST_BARE = 1 << 20  # a smaller number is missing its unit


def parse_size(text: str) -> int | None:
    """Read `80GB`, `80GiB`, `80G`, `512 B` or `85899345920`: whole bytes, above 0. None for anything else.

    A number without a unit is in bytes and must be at least 1 MiB: `80` is refused.
    """
    from fractions import Fraction  # slow to import

    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGT]?)(i?B|)", text, re.IGNORECASE)
    if not match or (match[3].lower() == "ib" and not match[2]):
        return None
    nbytes = int(Fraction(match[1]) * 1024 ** _POWERS[match[2].upper()])
    if not match[2] and not match[3] and (nbytes < _LEAST_BARE or "." in match[1]):
        return None
    return nbytes or None


def read_size(flag: str, text: str) -> int:
    nbytes = parse_size(text)
    if nbytes is None:
        is_bare = re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?", text) is not None
        unit = "GB" if is_bare and float(text) < 1024 else f"MB, or {text}B if these are bytes"
        hint = f"write {text}{unit}" if is_bare and float(text) else "for example 80GB (= 80GiB)"
        raise UsageError(flag, f"expected a size with a unit, found {text[:80]!r}", hint, code="options.memory-size")
    return nbytes


def write_size(nbytes: int) -> str:
    """Write a size exactly, as `parse_size` reads it: `80GiB`, `75B`."""
    units = [(1024**power, f"{letter}iB") for letter, power in _POWERS.items() if power]
    unit, name = max([(size, name) for size, name in units if nbytes % size == 0], default=(1, "B"))
    return f"{nbytes // unit}{name}"


def show_bytes(nbytes: int) -> str:
    """Return a size in the unit that leaves one to four digits before the point."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
