"""Tables with aligned columns, shortened for many stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import TypeVar

from manifests.schema import TieGroup
from reshard.layouts.model import compress_modules, short_name

MOST_ROWS = 40  # with more, similar stages share a row
_ENDS = 12  # rows kept at either end of a table that is still too long

T = TypeVar("T")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left_columns: frozenset[str] = frozenset()) -> str:
    """Return a table with aligned columns: `left_columns` to the left, others to the right."""
    return "\n".join(table_lines(head, lambda: rows, left_columns=left_columns))


def table_lines(
    head: Sequence[str], rows: Callable[[], Iterable[Sequence[str]]], *, left_columns: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the lines of a `table`. Its rows are made twice, as there may be a million."""
    widths = list(map(len, head))
    for row in rows():
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
    for row in chain((head,), rows()):
        cells = (
            cell.ljust(width) if name in left_columns else cell.rjust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        )
        yield "  ".join(cells).rstrip()


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


def modules_shown(modules: Sequence[str]) -> str:
    """Return a short list of modules, in the syntax of layout files: `embed_tokens, layers.0-7`."""
    return compress_modules(map(short_name, modules)) or "(empty)"


def tie_lines(ties: Sequence[TieGroup]) -> list[str]:
    return [
        f"tied: {tie.owner.fqn} (stage {tie.owner.stage}) = "
        + ", ".join(f"{replica.fqn} (stage {replica.stage})" for replica in tie.replicas)
        for tie in ties
    ]
