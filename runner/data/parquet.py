"""The columns of a Parquet file that are read: all rows from any row on, or those of a row group in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from manifests.errors import DataError, refused_by_system
from runner.data.rows import MOST_NBYTES, ROW_FIELDS, BadDocumentError, Fields, too_long

_COLUMN = "name the column of the text with --text-field"
_ROWS, _ROWS_NBYTES = 64, 64 << 20  # in memory at a time, where they are read in order; at least one row


def group_sizes(file: Path) -> tuple[int, ...]:
    """Return the number of rows of each row group."""
    with _open(file) as table:
        return tuple(table.metadata.row_group(group).num_rows for group in range(table.num_row_groups))


def read_rows(file: Path, fields: Fields, begin: int) -> Iterator[Mapping[str, Any]]:
    """Read the values by column from row `begin` on, counted from 0. Row groups before it are not read."""
    sizes = group_sizes(file)
    over = list(takewhile(lambda end: end <= begin, accumulate(sizes)))
    row = over[-1] if over else 0
    with _open(file, fields) as table:
        groups, columns = list(range(len(over), len(sizes))), _columns(table, fields)
        for rows in table.iter_batches(batch_size=_batch_size(table, columns), row_groups=groups, columns=columns):
            yield from _by_column(rows.slice(max(0, begin - row)), columns)
            row += len(rows)


def read_group(
    file: Path, fields: Fields, group: int, num_rows: int, order: Iterable[int]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Read the values of a row group of `num_rows` with their row numbers, in an order of their indices within it.

    The whole group is in memory, as Arrow arrays.
    """
    first = sum(group_sizes(file)[:group])
    with _open(file, fields) as table:
        rows = table.read_row_group(group, columns=(columns := _columns(table, fields)))
    if len(rows) != num_rows:
        problem = f"expected {num_rows} rows in row group {group} (footer), found {len(rows)}"
        hint = "a file must stay as it is while a run reads it"
        raise DataError(str(file), problem, hint, code="data.not-parquet")
    values = [rows.column(column) for column in columns]
    for place in order:
        yield first + place, {column: value[place] for column, value in zip(columns, values, strict=True)}


def _by_column(rows: Any, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for values in zip(*map(rows.column, columns), strict=True):
        yield dict(zip(columns, values, strict=True))


def _columns(table: Any, fields: Fields) -> list[str]:
    """Return the columns to read."""
    if fields.row is None:
        return [*fields.texts]
    return [name for name in fields.row.names if name in table.schema_arrow.names]


def _batch_size(table: Any, columns: Sequence[str]) -> int:
    """Return how many rows to read at a time: fewer of long texts, by the average of each row group."""
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    sizes: list[int] = [
        chunk.total_uncompressed_size // group.num_rows
        for group in groups
        if group.num_rows
        for chunk in map(group.column, range(group.num_columns))
        if chunk.path_in_schema.partition(".")[0] in columns
    ]
    return max(1, min(_ROWS, _ROWS_NBYTES // max(1, *sizes, 1)))


def text_of(buffer: Any | None, file: Path, column: str, row: int) -> str:
    """Return the text of a row, counted from 0, from the buffer of its value; None: it is null."""
    where = f"{file}: row {row + 1}"
    if buffer is None:
        raise BadDocumentError(where, f"expected text in column {column!r}, found null", code="data.no-text")
    if buffer.size > MOST_NBYTES:
        raise too_long(where, buffer.size)
    try:
        return str(buffer, "utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError(where, f"is not UTF-8: {error.reason}", code="data.not-utf8") from error


def nbytes_of(value: Any) -> int:
    """Return the size of a row's text, or about that of its list or number, in bytes; 0 for null."""
    if not value.is_valid:
        return 0
    if hasattr(value, "as_buffer"):
        return int(value.as_buffer().size)
    return 8 * len(value) if hasattr(value, "values") else 8


@contextmanager
def _open(file: Path, fields: Fields | None = None) -> Iterator[Any]:
    """Open a file, and check that it has the columns of the fields, if there are any."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        problem, hint = "reading Parquet requires pyarrow", "pip install pyarrow"
        raise DataError(str(file), problem, hint, code="data.needs-pyarrow") from error
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as table:  # of pages that have a checksum
            if fields is not None:
                for column in _columns(table, fields):
                    if table.schema_arrow.names.count(column) > 1:
                        problem = f"expected one column {column!r}, found several of that name"
                        raise DataError(str(file), problem, "write the file without the others", code="data.no-column")
                is_text = fields.row is None
                for column in fields.texts if is_text else ROW_FIELDS[:1]:
                    _check_column(table.schema_arrow, column, file, is_text=is_text)
            yield table
    except MemoryError:  # pyarrow.ArrowMemoryError is one: nothing is wrong with the file
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise refused_by_system(str(file), error, code="data.unreadable") from error
        raise DataError(str(file), f"cannot be read as Parquet: {error}", code="data.not-parquet") from error


def _check_column(schema: Any, column: str, file: Path, *, is_text: bool) -> None:
    import pyarrow

    if column not in schema.names:
        problem = f"expected a column {column!r}, found {', '.join(map(repr, schema.names))}"
        raise DataError(str(file), problem, _COLUMN if is_text else "", code="data.no-column")
    kind, types = schema.field(column).type, pyarrow.types
    if is_text and not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        problem = f"expected text in column {column!r}, found {kind}"
        hint = "write the categorical column as plain strings" if types.is_dictionary(kind) else _COLUMN
        raise DataError(str(file), problem, hint, code="data.no-column")
