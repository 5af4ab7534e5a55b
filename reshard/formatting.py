"""Formats counts, numbers and lists of names for sentences, and rows of tables; and parses lists of numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence, Set, Sized
from itertools import groupby, islice
from typing import TYPE_CHECKING, TypeVar

from manifests.errors import Parameter

if TYPE_CHECKING:
    from manifests.schema import Layout, TieGroup

WIDTH = 72  # characters of the spec shown around the caret
_MOST_NAMED = 5  # names in a sentence
_MOST_RUNS = 8
_MOST_MISSING = 1000  # of missing numbers; a name may have any number


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
        run = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", piece)
        if run is None or int(run[1]) > int(run[2] or run[1]):
            return None
        numbers.update(range(int(run[1]), int(run[2] or run[1]) + 1))
    return frozenset(numbers)


def number_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run without gaps."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append((members[0], members[-1]))
    return runs


def nearest_word(word: str, candidates: Iterable[str]) -> str:
    """Return the most similar candidate, or nothing if none is similar."""
    return next(iter(difflib.get_close_matches(word[:WIDTH], list(candidates), n=1)), "")


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return the hint of an error about an unknown word: the most similar candidate, or nothing if none is similar."""
    nearest = nearest_word(word, candidates)
    return f"did you mean {nearest}?" if nearest else ""


def list_words(words: Iterable[object], conjunction: str = "or") -> str:
    """Join words as in a sentence: `8, 16 or 32`."""
    *head, last = map(str, words)
    return f"{', '.join(head)} {conjunction} {last}" if head else last


def counted(number: int, noun: str) -> str:
    """Return `1 stage`, `2 stages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def count_of(items: Sized, noun: str) -> str:
    return counted(len(items), noun)


def some(names: Collection[str]) -> str:
    """Return the first few of many names, for a sentence."""
    return ", ".join(islice(names, _MOST_NAMED)) + (", ..." if len(names) > _MOST_NAMED else "")


def in_one_line(text: str) -> str:
    """Replace white space by a space and unprintable characters by ?, one for one."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)


def find_missing(numbers: Set[int], expected: range) -> tuple[int, tuple[int, ...]]:
    """Return how many of a range's numbers are not in use, and the first of them.

    Takes time and memory in proportion to `numbers`, however long the range is.
    """
    count = len(expected) - sum(number in expected for number in numbers)
    return count, tuple(islice((number for number in expected if number not in numbers), min(count, _MOST_MISSING)))


def shorten(text: str) -> str:
    """Shorten a text to fit into a sentence, on one line."""
    return in_one_line(text if len(text) <= WIDTH else text[: WIDTH - 1] + "…")


MOST_ROWS = 40  # with more, similar stages share a row
_ENDS = 12  # rows kept at either end of a table that is still too long

T = TypeVar("T")


def group_stages(stages: Sequence[T], keys: Sequence[object]) -> list[Sequence[T]]:
    """Group stages by row: one stage per row if there are few, else runs of stages with equal keys."""
    if len(stages) <= MOST_ROWS:
        return [[stage] for stage in stages]
    runs = groupby(zip(stages, keys, strict=True), key=lambda pair: pair[1])
    return [[stage for stage, _ in run] for _, run in runs]


def shorten_rows(rows: Sequence[tuple[str, ...]], column: int) -> Sequence[tuple[str, ...]]:
    """Omit the middle of a table that is too long, with a note in one `column`."""
    if len(rows) <= MOST_ROWS:
        return rows
    cells = [""] * len(rows[0])
    cells[column] = f"... {len(rows) - 2 * _ENDS} more rows, see --json ..."
    return [*rows[:_ENDS], tuple(cells), *rows[-_ENDS:]]


def tie_lines(ties: Sequence[TieGroup]) -> list[str]:
    return [
        f"tied: {tie.owner.fqn} (stage {tie.owner.stage}) = "
        + ", ".join(f"{replica.fqn} (stage {replica.stage})" for replica in tie.replicas)
        for tie in ties
    ]


def untied_notes(untied: Iterable[Sequence[str]]) -> list[str]:
    """Return a note on each group of weights that config.json ties, and that are packed as two."""
    return [
        f"note: config.json ties {list_words(group, 'and')}, but the files store different values for them: they are "
        f"packed as two weights, as transformers 5 reads them; with {Parameter('drop', [group[-1]])} they are one, as "
        "vLLM and transformers 4 read them"
        for group in untied
    ]


def describe_layout(layout: Layout) -> str:
    stages, ranks = counted(layout.num_stages, "stage"), counted(layout.num_ranks, "rank")
    return f"{layout.spec}: {stages} on {ranks}, style {layout.style}"
