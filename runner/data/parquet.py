"""The text column of a Parquet file: all rows from any one on, or those of a row group in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from manifests.errors import InputError, refused_by_system

__all__ = ["group_sizes", "read_group", "read_rows"]

_COLUMN = "--text-field NAME says which one holds the text"
_ROWS = 64  # in memory at a time, where they are read in order


def group_sizes(file: Path) -> tuple[int, ...]:
    """Give the number of rows of each row group.

    Raises:
        InputError: it cannot be read as Parquet.
    """
    with _open(file) as table:
        return tuple(table.metadata.row_group(group).num_rows for group in range(table.num_row_groups))


def read_rows(file: Path, column: str, begin: int) -> Iterator[str]:
    """Give the texts from row `begin` on, the first being 0. Row groups that end before it are not read.

    Raises:
        InputError: it cannot be read as Parquet, has no such column of text, or has a row without text.
    """
    sizes = group_sizes(file)
    over = list(takewhile(lambda end: end <= begin, accumulate(sizes)))
    row = over[-1] if over else 0
    with _open(file, column) as table:
        groups = list(range(len(over), len(sizes)))
        for rows in table.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[column]):
            for value in rows.column(0)[max(0, begin - row) :]:
                yield _text(value, file, column, max(begin, row))
                begin = max(begin, row) + 1
            row += len(rows)


def read_group(file: Path, column: str, group: int, order: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Give a row group's texts with the numbers of their rows; `order` names rows by their place in the group.

    All texts of the group are in memory, as Arrow has them.

    Raises:
        InputError: as `read_rows`.
    """
    first = sum(group_sizes(file)[:group])
    with _open(file, column) as table:
        values = table.read_row_group(group, columns=[column]).column(0)
    for place in order:
        yield first + place, _text(values[place], file, column, first + place)


def _text(value: Any, file: Path, column: str, row: int) -> str:
    if not value.is_valid:
        raise InputError(f"{file}: row {row + 1}", f"expected text in column {column!r}, found null")
    return str(value.as_py())


@contextmanager
def _open(file: Path, column: str | None = None) -> Iterator[Any]:
    """Open a file whose column, if one is named, holds text."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(str(file), "Parquet needs pyarrow, which is not installed", "pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file) as table:
            if column is not None:
                _check_column(table.schema_arrow, column, file)
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise refused_by_system(str(file), error) from error
        raise InputError(str(file), f"cannot be read as Parquet: {error}") from error


def _check_column(schema: Any, column: str, file: Path) -> None:
    import pyarrow

    if column not in schema.names:
        raise InputError(str(file), f"no column {column!r}; it has {', '.join(map(repr, schema.names))}", _COLUMN)
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise InputError(str(file), f"expected text in column {column!r}, found {kind}", _COLUMN)
