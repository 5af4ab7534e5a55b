"""A quick look at long pickles: whether they are plainly ones that the exact check would pass.

The metadata of a large checkpoint has ten million opcodes, which a regular expression follows in a tenth of the time.

Source: CPython 3.11, pickletools.py.
"""

from __future__ import annotations

import re
from functools import cache

__all__ = ["is_plain"]

_LEAST_NBYTES = 1 << 20  # shorter ones are quickly checked
_TUPLES = b"\x85\x86\x87t\x91"  # the opcodes of tuples and frozensets
_MOST_NESTED = 4096  # a hash of tuples in so many tuples takes 1 MB of C's stack
_RUN = 16  # opcodes
_LEAF_OBJECTS = 5  # of a tuple of three numbers, in another


def is_plain(data: bytes, most_objects: int) -> bool:
    """Return whether a long pickle has only opcodes of plain values, too few to nest deeply or to take much memory.

    Tuples of numbers, alone or in a tuple, are followed; of all others it is assumed that each contains the one before.
    """
    if len(data) < _LEAST_NBYTES or not data.endswith(b"."):
        return False
    rest, num_runs = _runs().subn(b"", memoryview(data)[:-1])
    num_objects = _RUN * num_runs + _LEAF_OBJECTS * sum(data.count(code) for code in _TUPLES)
    return not rest.strip(_TUPLES) and len(rest) <= _MOST_NESTED and num_objects <= most_objects


@cache
def _runs() -> re.Pattern[bytes]:
    """Return the pattern of a few opcodes, with their arguments; tuples are among them if they are of numbers."""

    def counted(code: bytes, most: int) -> bytes:
        return code + b"(?:" + b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(most + 1)) + b")"

    number = rb"(?:K.|M..|J.{4}|" + counted(rb"\x8a", 9) + b")"
    leaf = b"|".join(number * count + code for count, code in ((1, rb"\x85"), (2, rb"\x86"), (3, rb"\x87")))
    codes = (
        rb"[\x94)\x81(bu}NR\x88\x89\]\x8fsae\x90\x93Q]", rb"j.{4}", rb"h.", b"(?:" + leaf + rb")(?:\x94?\x85)?",
        number, counted(rb"\x8c", 255), rb"G.{8}", rb"\x80.", rb"\x95.{8}", counted(b"C", 255),
    )  # fmt: skip
    return re.compile(b"(?:" + b"|".join(codes) + b"){1,%d}+" % _RUN, re.DOTALL)
