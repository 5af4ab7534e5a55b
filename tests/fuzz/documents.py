"""Fuzz targets: files of text. What is read is read again from any cursor on; all else is refused by file and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from manifests.errors import InputError
from manifests.schema import DataCursor
from runner.config.schema import DataOptions
from runner.data.documents import open_sources
from runner.data.mixture import Cursor, draw_documents, first_cursor
from runner.data.rows import Skipped
from runner.data.tokenizer import TokenIds, Vocabulary, load_vocabulary
from tests.fast.runner.data.words import VOCAB_SIZE, write_tokenizer
from tests.fuzz.folder import check_refusal, scratch

_WAYS: tuple[dict[str, Any], ...] = ({}, {"shuffle": True, "skip_bad_documents": True}, {"skip_bad_documents": True})


def check_text(data: bytes) -> None:
    """Raise AssertionError unless a `.txt` file is refused by name, or read alike from each of its cursors."""
    _check(data, "a.txt")


def check_lines(data: bytes) -> None:
    """Raise AssertionError unless a `.jsonl` file is refused by name, or read alike from each of its cursors."""
    _check(data, "a.jsonl")


def check_rows(data: bytes) -> None:
    """Raise AssertionError unless a `.parquet` file is refused by name, or read alike from each of its cursors."""
    _check(data, "a.parquet")


def texts() -> tuple[bytes, ...]:
    """Return text files: plain, with a byte order mark, of characters of every length, and cut in the middle of one."""
    whole = "w0 w1\nw2 é語😀 w3\r\n\nw4 " * 3
    return (
        whole.encode(),
        b"\xef\xbb\xbf" + whole.encode(),
        whole.encode()[:17],
        b"w1 \xff w2\n",
        whole.encode("utf-16"),
    )


def lines() -> tuple[bytes, ...]:
    """Return files of lines: good ones, and some that hold other JSON, half a character, or none."""
    good = b'{"text": "w0 w1 w2"}\n\n{"id": 1, "text": "w3 \\u00e9 \\ud83d\\ude00 w4"}\r\n{"text": ""}\n{"text": "w5"}'
    return good, b'{"text": "w0 \\ud800"}\n', b'{"text": "\xed\xa0\x80"}\n', b"[1]\n", b'{"text": null}\n', b"{"


def rows() -> tuple[bytes, ...]:
    """Return Parquet files: two row groups, plain and compressed; null, invalid UTF-8, and a column of numbers."""
    column = pyarrow.array(["w0 w1 w2", "", "w3 é", "w4"])
    invalid = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"w1 \xff"]).buffers())
    encoded = column.dictionary_encode().cast(pyarrow.string())
    return (
        _written({"text": column}), _written({"text": encoded}, "zstd"),
        _written({"text": pyarrow.array(["w1", None])}), _written({"text": invalid}), _written({"text": [1, 2]}),
    )  # fmt: skip


def _written(columns: dict[str, Any], compression: str = "none") -> bytes:
    stream = BytesIO()
    parquet.write_table(pyarrow.table(columns), stream, row_group_size=2, compression=compression, store_schema=False)
    return stream.getvalue()


def _check(data: bytes, name: str) -> None:
    file = scratch("documents") / name
    file.write_bytes(data)
    for way in _WAYS:
        _check_read(file, DataOptions(sources=(str(file),), **way))


def _check_read(file: Path, data: DataOptions) -> None:
    try:
        whole = list(_runs(data, first_cursor(1), 8))
    except InputError as error:
        check_refusal(error, file)
        return
    for number in (1, len(whole) - 1):
        cursor, ids = whole[number]
        later = replace(cursor, num_tokens=cursor.num_tokens + len(ids) - 1)
        expected = [(later, ids[-1:]), *whole[number + 1 :]]
        assert list(_runs(data, later, len(expected))) == expected


def _runs(data: DataOptions, cursor: DataCursor, count: int) -> Iterator[tuple[Cursor, TokenIds]]:
    """Read the first pieces of documents from a cursor on."""
    skipped = Skipped(count=getattr(cursor, "num_skipped", 0)) if data.skip_bad_documents else None
    documents = draw_documents(data, open_sources(data), _vocabulary(), cursor, is_endless=True, skipped=skipped)
    return islice(chain.from_iterable(document.runs for document in documents), count)


@cache
def _vocabulary() -> Vocabulary:
    return load_vocabulary(write_tokenizer(scratch("documents") / "tokenizer"), VOCAB_SIZE)
