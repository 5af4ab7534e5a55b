"""Documents from text, JSON Lines and Parquet files, in pieces of bounded size, from any offset.

An offset is a byte of a `.txt` or `.jsonl` file, and a row of a `.parquet` file.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

from manifests.errors import DataError, printable, refused_by_system, system_errors
from manifests.jsontext import kind_of
from runner.data.parquet import nbytes_of, read_rows, text_of
from runner.data.rows import MOST_NBYTES, BadDocumentError, Fields, Prompt, TokenIds, parse_row, too_long

TEXT, LINES, ROWS = SUFFIXES = (".txt", ".jsonl", ".parquet")
_OTHERS = 'convert other formats to .jsonl, with a line {"text": "…"} for each document'
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_BYTE_ORDER_MARK = codecs.BOM_UTF8
_PIECE_NBYTES = 64 << 10
_SCAN_NBYTES = 1 << 20
_LINE_COUNTS: dict[tuple[Path, int], list[tuple[int, int]]] = {}  # by file and mtime: offsets, the lines before them
_PIECE_LENGTH = 256 << 10  # characters; a tokenizer needs some 300 bytes for each

Piece: TypeAlias = "str | TokenIds"  # of text, or a row of token ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text, or the rest of one, or a row of token ids.

    It is the concatenation of its pieces, which come with their offsets and end at line ends where possible. Iterating
    over them raises BadDocumentError where they are not text. It can be pickled.
    """

    file: Path
    begin: int  # its offset
    end: int  # the offset of the file's next document, or before it
    nbytes: int  # of its text in the file, at least
    read: Callable[[], Iterator[tuple[int, Piece]]]

    def __reduce__(self) -> tuple[Any, ...]:  # dataclasses' own way of pickling takes several times as long
        return partial(Document, file=self.file, begin=self.begin, end=self.end, nbytes=self.nbytes, read=self.read), ()

    @property
    def pieces(self) -> Iterator[tuple[int, Piece]]:
        return self.read()

    @property
    def is_file(self) -> bool:
        """Whether its file has no other document; `Path.suffix` takes ten times as long."""
        return str(self.file).endswith(TEXT)

    @property
    def is_rest(self) -> bool:
        return self.begin > 0 and self.is_file

    @property
    def where(self) -> str:
        """The file, and line or row counted from 1."""
        if self.file.suffix == LINES:
            return _line_at(self.file, self.begin)
        return f"{self.file}: row {self.begin + 1}" if self.file.suffix == ROWS else str(self.file)


def find_files(sources: Iterable[str]) -> tuple[Path, ...]:
    """Return the files of the sources, in the given order, sorted within a folder or glob."""
    return tuple(file for source in sources for file in _files_of(source))


def read_documents(file: Path, fields: Fields, begin: int = 0) -> Iterator[Document]:
    """Read documents from an offset on: a `.txt` file, a line of `.jsonl` or a row of `.parquet` is one document."""
    return _READERS[file.suffix](file, fields, begin)


def has_text(file: Path, fields: Fields) -> bool:
    """Check the beginning of a file's first document, and return whether there is one.

    A line of more than 1 MiB is not parsed, nor read to its end.
    """
    if file.suffix == LINES:
        return _has_line(file, fields)
    document = next(read_documents(file, fields), None)
    if document is not None and (file.suffix == TEXT or document.nbytes <= _SCAN_NBYTES):
        next(document.pieces, None)
    return document is not None


def _has_line(file: Path, fields: Fields) -> bool:
    begin = 0
    with _open(file) as stream:
        while line := stream.readline(_SCAN_NBYTES):
            if not line.isspace():
                if line.endswith(b"\n") or len(line) < _SCAN_NBYTES:
                    next(_record_pieces(line, fields, file, begin), None)
                return True
            begin += len(line)
    return False


def line_offsets(file: Path) -> Iterator[int]:
    """Yield the offsets of the non-blank lines of a `.jsonl` file."""
    with _open(file, _SCAN_NBYTES) as stream:
        yield from (offset for offset, _, line in _lines(stream, 0, _SCAN_NBYTES) if not line.isspace())


def file_nbytes(file: Path) -> int:
    """Return the size of a file."""
    with _open(file) as stream:
        return stream.seek(0, 2)


def _lines(stream: BinaryIO, begin: int, most_nbytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the lines from an offset on: where each begins and ends, and its first bytes, at most so many."""
    while line := stream.readline(most_nbytes):
        end, last = begin + len(line), line
        while not last.endswith(b"\n") and (last := stream.readline(_SCAN_NBYTES)):
            end += len(last)
            line = last if line.isspace() else line
        yield begin, end, line
        begin = end


def _files_of(source: str) -> Iterator[Path]:
    path = Path(source)
    if path.is_dir():
        files = sorted(_texts_in([path], set()))
        if not files:
            problem = f"no file in this folder ends in {', '.join(SUFFIXES)}"
            raise DataError(source, problem, _OTHERS, code="data.no-files")
    elif path.exists():
        files = [path]
    else:
        matches = {Path(name) for name in glob.glob(source, recursive=True)}
        folders = set(filter(Path.is_dir, matches))
        files = sorted(matches - folders | {*_texts_in(folders, set())})
        if not files:
            problem, hint = "no file, folder or glob matches it", "check the path for typos"
            if "://" in source:
                hint = "data is read from this machine: download it first"
            elif all(map(os.path.exists, source.split(","))):
                hint = "give --data once for each"
            raise DataError(source, problem, hint, code="data.no-files")
    for file in files:
        if file.suffix not in SUFFIXES:
            problem = f"expected a file that ends in {', '.join(SUFFIXES)}"
            raise DataError(str(file), problem, _OTHERS, code="data.unknown-format")
        if not file.is_file():
            raise DataError(str(file), "expected a file, found a link to nothing, or a pipe", code="data.unreadable")
        yield file


def _texts_in(folders: Iterable[Path], searched: set[Path]) -> Iterator[Path]:
    """Yield what ends as texts do in folders, and where links in them lead: that of each folder once."""

    def fail(error: OSError) -> NoReturn:
        raise refused_by_system(str(error.filename), error, code="data.unreadable") from error

    links: list[Path] = []
    for folder in sorted(folders, key=lambda folder: (folder.is_symlink(), folder)):
        for place, subfolders, names in os.walk(folder, onerror=fail):
            if (real := Path(place).resolve()) in searched:
                subfolders.clear()
                continue
            searched.add(real)
            subfolders[:] = (name for name in subfolders if not name.startswith("."))  # as globs do
            paths = [Path(place, name) for name in names if not name.startswith(".")]
            for path, whole in ((path, path.with_suffix("")) for path in paths):
                if path.suffix in _COMPRESSED and whole.suffix in SUFFIXES and whole not in paths:
                    hint = "decompress it, or move it elsewhere"
                    raise DataError(
                        str(path), "is compressed data, which is not read", hint, code="data.unknown-format"
                    )
            yield from (path for path in paths if path.suffix in SUFFIXES)
            links += filter(Path.is_symlink, (Path(place, name) for name in subfolders))
    if links:
        yield from _texts_in(links, searched)


def _read_text(file: Path, fields: Fields, begin: int) -> Iterator[Document]:
    if fields.row is not None or fields.completion is not None:
        problem = "is text, which has no fields for --tokenized or --completion-field"
        raise DataError(str(file), problem, "use .jsonl or .parquet files", code="data.unknown-format")
    if begin < (size := file_nbytes(file)):
        yield Document(file=file, begin=begin, end=size, nbytes=size - begin, read=partial(_text_pieces, file, begin))


def _text_pieces(file: Path, begin: int) -> Iterator[tuple[int, str]]:
    """Read the pieces of a file from an offset on."""
    decoder = codecs.getincrementaldecoder("utf-8" if begin else "utf-8-sig")()
    with _open(file) as stream:
        if begin:
            stream.seek(max(0, begin - 3))
            decoder.setstate((_begun_character(stream.read(begin - stream.tell())), 0))
        while True:
            offset = stream.tell()
            data = stream.read(_PIECE_NBYTES)
            data += stream.readline(_PIECE_NBYTES)  # to the end of the line, if that is near
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                num_lines = error.object[: error.start].count(b"\n")
                raise _not_utf8(_line_at(file, offset, num_lines), error) from error
            if text:
                yield offset, text
            if not data:
                return


def _begun_character(data: bytes) -> bytes:
    """Return the bytes of an incomplete character at the end of some UTF-8."""
    for length in range(1, min(3, len(data)) + 1):
        first = data[-length]
        if first & 0xC0 != 0x80:  # not a continuation byte
            needed = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return data[-length:] if needed > length else b""
    return b""


def _read_json_lines(file: Path, fields: Fields, begin: int) -> Iterator[Document]:
    with _open(file) as stream:
        stream.seek(begin)
        for first, end, line in _lines(stream, begin, MOST_NBYTES):
            if not line.isspace():
                read = partial(_json_pieces, line, fields, file, first, end - first)
                yield Document(file=file, begin=first, end=end, nbytes=end - first, read=read)


def line_document(file: Path, fields: Fields, begin: int, end: int) -> Document:
    """Return the document of the line at an offset, which is read when its pieces are; the next one is at `end`."""
    read = partial(_line_pieces, file, fields, begin, end)
    return Document(file=file, begin=begin, end=end, nbytes=end - begin, read=read)


def _line_pieces(file: Path, fields: Fields, begin: int, end: int) -> Iterator[tuple[int, Piece]]:
    with _open(file) as stream:
        stream.seek(begin)
        _, after, line = next(_lines(stream, begin, MOST_NBYTES), (begin, begin, b""))
        nbytes = after - begin
        while after < end and (blank := stream.read(min(_SCAN_NBYTES, end - after))).isspace():
            after += len(blank)
    if after != end:  # an offset is of the first rank's file
        problem = "has other lines than on the first rank, or has changed since their offsets were read"
        hint = "every node must see the same files: a copy on the node's own disk may be outdated"
        raise DataError(str(file), problem, hint, code="data.differs-between-ranks")
    yield from _json_pieces(line, fields, file, begin, nbytes)


def _json_pieces(line: bytes, fields: Fields, file: Path, begin: int, nbytes: int) -> Iterator[tuple[int, Piece]]:
    if nbytes > MOST_NBYTES:
        raise too_long(_line_at(file, begin), nbytes)
    yield from _record_pieces(line, fields, file, begin)


def _record_pieces(line: bytes, fields: Fields, file: Path, begin: int) -> Iterator[tuple[int, Piece]]:
    record = _json_record(line, file, begin)
    if fields.row is not None:
        yield begin, parse_row(record, fields.row, lambda: _line_at(file, begin)).encode()
        return
    yield from _text_pieces_of([_json_text(record, name, file, begin) for name in fields.texts], begin)


def _text_pieces_of(texts: Sequence[str], offset: int) -> Iterator[tuple[int, str]]:
    """Yield the pieces of a text, or of a prompt and its completion."""
    *prompts, text = texts
    for prompt in prompts:
        yield from ((place, Prompt(piece)) for place, piece in _bounded(offset, prompt))
    yield from _bounded(offset, text)


def _bounded(offset: int, text: str) -> Iterator[tuple[int, str]]:
    """Yield a text in pieces of bounded length, which end at line ends or before spaces where there are any.

    All have the document's own offset: one that is resumed is read again from its start.
    """
    begin = 0
    while len(text) - begin > _PIECE_LENGTH:
        most = begin + _PIECE_LENGTH
        end = text.rfind("\n", begin, most) + 1 or text.rfind(" ", begin + 1, most)
        end = end if end > begin else most
        yield offset, text[begin:end]
        begin = end
    yield offset, text[begin:]


def _json_record(line: bytes, file: Path, begin: int) -> dict[str, Any]:
    try:
        record = json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(_line_at(file, begin), error) from error
    except (ValueError, RecursionError) as error:
        raise BadDocumentError(
            _line_at(file, begin),
            f"is not valid JSON: {printable(str(error))}",
            "correct the line, or leave out such documents with --skip-bad-documents",
            code="data.not-json",
        ) from error
    if isinstance(record, dict):
        return record
    problem = f"expected a JSON object, found {kind_of(record)}"
    raise BadDocumentError(_line_at(file, begin), problem, _OTHERS, code="data.not-an-object")


def _json_text(record: Mapping[str, Any], name: str, file: Path, begin: int) -> str:
    text = record.get(name)
    if isinstance(text, str):
        _check_characters(text, file, begin)
        return text
    if name not in record:
        problem = f"expected a field {name!r}, found {', '.join(map(repr, sorted(record)))}"
    else:
        problem = f"expected text in field {name!r}, found {kind_of(record[name])}"
    hint = "name the field of the text with --text-field"
    raise BadDocumentError(_line_at(file, begin), problem, hint, code="data.no-text")


def _check_characters(text: str, file: Path, begin: int) -> None:
    """Refuse a lone surrogate, which JSON can express and tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        problem = f"character {error.start + 1} of its text is a lone surrogate (\\u{half:04x}), not valid Unicode"
        raise BadDocumentError(_line_at(file, begin), problem, code="data.lone-surrogate") from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> BadDocumentError:
    return BadDocumentError(
        where, f"is not UTF-8: {error.reason}", "convert it: iconv -t UTF-8 -f ENCODING FILE", code="data.not-utf8"
    )


def _line_at(file: Path, offset: int, num_lines: int = 0) -> str:
    """Return the file and line number of the line `num_lines` after the one at an offset, by counting lines.

    It counts from the nearest place before it that was counted to: files may have many documents that are skipped.
    """
    with _open(file) as stream:
        counts = _LINE_COUNTS.setdefault((file, os.fstat(stream.fileno()).st_mtime_ns), [(0, 0)])
        begin, num_before = counts[bisect_right(counts, (offset, offset)) - 1]
        place = stream.seek(begin)
        while data := stream.read(min(_SCAN_NBYTES, offset - place)):
            num_before += data.count(b"\n")
            place += len(data)
    if place > begin:
        insort(counts, (place, num_before))
    return f"{file}:{num_before + num_lines + 1}"


def _read_parquet(file: Path, fields: Fields, begin: int) -> Iterator[Document]:
    for row, values in enumerate(read_rows(file, fields, begin), start=begin):
        yield row_document(file, fields, row, values)


def row_document(file: Path, fields: Fields, row: int, values: Mapping[str, Any]) -> Document:
    """Return the document of a row, counted from 0; `values` are its Arrow values by column."""
    nbytes = sum(map(nbytes_of, values.values()))
    if fields.row is None:  # pickled, a value would be decoded, and its buffer is not
        values = {column: value.as_buffer() if value.is_valid else None for column, value in values.items()}
    read = partial(_row_pieces, file, fields, row, values)
    return Document(file=file, begin=row, end=row + 1, nbytes=nbytes, read=read)


def _row_pieces(file: Path, fields: Fields, row: int, values: Mapping[str, Any]) -> Iterator[tuple[int, Piece]]:
    if fields.row is not None:
        where = f"{file}: row {row + 1}"
        try:
            record = {column: value.as_py() for column, value in values.items()}
        except UnicodeDecodeError as error:
            raise BadDocumentError(where, f"is not UTF-8: {error.reason}", code="data.not-utf8") from error
        yield row, parse_row(record, fields.row, lambda: where).encode()
        return
    yield from _text_pieces_of([text_of(values[name], file, name, row) for name in fields.texts], row)


_READERS: Mapping[str, Callable[[Path, Fields, int], Iterator[Document]]] = {
    TEXT: _read_text,
    LINES: _read_json_lines,
    ROWS: _read_parquet,
}


@contextmanager
def _open(file: Path, buffer_nbytes: int = -1) -> Iterator[BinaryIO]:
    with system_errors(file, code="data.unreadable"), open(file, "rb", buffering=buffer_nbytes) as stream:
        yield stream
