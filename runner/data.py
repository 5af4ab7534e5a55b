"""Documents out of text, JSON line and Parquet files, in order and a bounded piece at a time."""

from __future__ import annotations

import codecs
import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from manifests.errors import InputError
from manifests.jsontext import kind_of

__all__ = ["SUFFIXES", "Document", "find_files", "read_documents"]

_PIECE_NBYTES = 64 << 10
_ROWS = 64  # of a Parquet file, read at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text to learn from. Its pieces, which end at line ends where they can, add up to it."""

    where: str  # file, and line or row
    pieces: Iterator[str]


def find_files(sources: Iterable[str]) -> tuple[Path, ...]:
    """Give the files that the sources name: in the order given, sorted within a folder or a glob.

    Raises:
        InputError: a source that names nothing, or a file of a kind that is not read.
    """
    return tuple(file for source in sources for file in _files_of(source))


def read_documents(files: Iterable[Path], text_field: str) -> Iterator[Document]:
    """Give every document: a `.txt` file is one, a line of `.jsonl` one, a row of `.parquet` one.

    Raises:
        InputError: naming the file, and the line or row, that cannot be read or holds no text.
    """
    for file in files:
        yield from _READERS[file.suffix](file, text_field)


def _files_of(source: str) -> Iterator[Path]:
    path = Path(source)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _READERS and file.is_file())
        if not found:
            raise InputError(source, f"no file in this folder ends in {', '.join(SUFFIXES)}")
    elif path.exists():
        found = [path]
    else:
        found = sorted(Path(name) for name in glob.glob(source, recursive=True) if Path(name).is_file())
        if not found:
            raise InputError(source, "no such file or folder, and no file matches it")
    for file in found:
        if file.suffix not in _READERS:
            raise InputError(str(file), f"expected a file that ends in {', '.join(SUFFIXES)}")
        yield file


def _read_text(file: Path, text_field: str) -> Iterator[Document]:
    yield Document(where=str(file), pieces=_text_pieces(file))


def _text_pieces(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    num_lines = 0
    with _open(file) as stream:
        while True:
            data = stream.read(_PIECE_NBYTES)
            data += stream.readline(_PIECE_NBYTES)  # to the end of the line, if that is near
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = num_lines + error.object[: error.start].count(b"\n") + 1
                raise InputError(f"{file}:{line}", f"is not UTF-8: {error.reason}") from error
            if text:
                yield text
            if not data:
                return
            num_lines += data.count(b"\n")


def _read_json_lines(file: Path, text_field: str) -> Iterator[Document]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{file}:{number}"
                yield Document(where=where, pieces=iter((_json_text(line, text_field, where),)))


def _json_text(line: bytes, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(where, f"is not a line of JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(where, f"expected a JSON object, found {kind_of(record)}")
    if text_field not in record:
        raise InputError(where, f"no field {text_field!r}; it has {', '.join(map(repr, sorted(record)))}")
    if not isinstance(record[text_field], str):
        raise InputError(where, f"expected text in {text_field!r}, found {kind_of(record[text_field])}")
    return str(record[text_field])


def _read_parquet(file: Path, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(str(file), "Parquet needs pyarrow, which is not installed") from error
    try:
        with parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            if text_field not in schema.names:
                raise InputError(str(file), f"no column {text_field!r}; it has {', '.join(map(repr, schema.names))}")
            kind = schema.field(text_field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise InputError(str(file), f"expected text in column {text_field!r}, found {kind}")
            groups = table.iter_batches(batch_size=_ROWS, columns=[text_field])
            texts = (text for rows in groups for text in rows.column(0).to_pylist())
            for number, text in enumerate(texts, start=1):
                where = f"{file}: row {number}"
                if text is None:
                    raise InputError(where, f"expected text in column {text_field!r}, found null")
                yield Document(where=where, pieces=iter((text,)))
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(str(file), f"cannot be read as Parquet: {error}") from error


_READERS: Mapping[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    try:
        with open(file, "rb") as stream:
            yield stream
    except OSError as error:
        raise InputError(str(file), f"cannot be read: {error.strerror}") from error
