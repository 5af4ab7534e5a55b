"""Documents that are no text are refused by line or row when they are drawn, or skipped and counted."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from runner.config.schema import BatchOptions, DataOptions
from runner.data.files import has_text
from runner.data.mixture import Cursor
from runner.data.rows import BadDocumentError, Fields, Skipped
from runner.data.sequences import IGNORED, Batch, read_batches, read_once
from tests.fast.runner.data.words import BOS, EOS, FIRST, VOCAB_SIZE, write_tokenizer

GOOD = (b"w1 w2 w3", b"w4", b"w5 w6")
# What a line of JSON, a row and a text may be instead, with the code of its refusal.
BAD_LINES = (
    (b'{"text": "w1 \\ud800 w2"}', "data.lone-surrogate"),
    (b'{"text": "w1 \xed\xa0\x80"}', "data.not-utf8"),
    (b'{"text": "w1 \xff"}', "data.not-utf8"),
    (b'{"text": "w1 \xe2\x82"}', "data.not-utf8"),
    (b'{"text": null}', "data.no-text"),
    (b'{"body": "w1"}', "data.no-text"),
    (b'["w1"]', "data.not-an-object"),
    (b"{", "data.not-json"),
    (b"[" * 100_000, "data.not-json"),
)
BAD_ROWS = ((None, "data.no-text"), (b"w1 \xff", "data.not-utf8"), (b"\xed\xa0\x80", "data.not-utf8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_lines(file: Path, lines: list[bytes]) -> str:
    file.write_bytes(b"\n".join(line if line[:1] in b'{["' else b'{"text": "%s"}' % line for line in lines))
    return str(file)


def write_rows(file: Path, rows: list[bytes | None], group: int = 2) -> str:
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(rows), pyarrow.array(rows, pyarrow.binary()).buffers())
    parquet.write_table(pyarrow.table({"text": column}), file, row_group_size=group)
    return str(file)


def read(data: DataOptions, folder: Path, *, seq_len: int = 3, cursor: Cursor | None = None) -> Iterator[Batch]:
    batch = BatchOptions(global_batch=1, microbatch=1, seq_len=seq_len)
    skipped = Skipped(count=cursor.num_skipped if cursor else 0)
    return read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE, cursor=cursor, skipped=skipped)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("line", "code"), BAD_LINES)
def test_line_that_is_no_text_is_refused_by_its_number_when_it_is_drawn(
    line: bytes, code: str, shuffle: bool, folder: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "a.jsonl", [*GOOD, line, *GOOD])
    with pytest.raises(BadDocumentError) as error:
        list(islice(read(DataOptions(sources=(source,), shuffle=shuffle), folder), 20))
    assert (error.value.where, error.value.code, error.value.exit_code) == (f"{source}:4", code, 3)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("row", "code"), BAD_ROWS)
def test_row_that_is_no_text_is_refused_by_its_number_when_it_is_drawn(
    row: bytes | None, code: str, shuffle: bool, folder: Path, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "a.parquet", [*GOOD, row, *GOOD])
    with pytest.raises(BadDocumentError) as error:
        list(islice(read(DataOptions(sources=(source,), shuffle=shuffle), folder), 20))
    assert (error.value.where, error.value.code, error.value.exit_code) == (f"{source}: row 4", code, 3)


def test_file_that_was_changed_before_the_cursor_is_refused_and_not_our_bug(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"w1 w2\n" * 30_000)
    batch = next(read(DataOptions(sources=(str(source),)), folder, seq_len=25_000))
    assert batch.cursor is not None
    (position,) = batch.cursor.sources
    source.write_bytes(b"w1 w2\n" * (position.offset // 6 - 1) + b"w1 w2\xff" + b"w1 w2\n" * 20_000)
    with pytest.raises(BadDocumentError) as error:
        next(read(DataOptions(sources=(str(source),)), folder, seq_len=3, cursor=batch.cursor))
    assert error.value.code == "data.not-utf8"


LINES = st.lists(st.sampled_from([*GOOD, *GOOD, *(line for line, _ in BAD_LINES[:-1])]), min_size=1, max_size=7)
ROWS = st.lists(st.sampled_from([*GOOD, *(row for row, _ in BAD_ROWS)]), min_size=1, max_size=7)
TEXTS = st.lists(st.sampled_from([*GOOD, *GOOD, b"w1 \xff w2"]), min_size=1, max_size=3)


@settings(max_examples=25)
@given(
    lines=LINES, rows=ROWS, texts=TEXTS, seq_len=st.integers(1, 6),
    how=st.fixed_dictionaries({"pack": st.booleans(), "shuffle": st.booleans(), "seed": st.integers(0, 3)}),
    is_weighted=st.booleans(),
)  # fmt: skip
def test_skipped_documents_are_counted_alike_from_any_cursor_on(
    lines: list[bytes], rows: list[bytes | None], texts: list[bytes], seq_len: int, how: dict[str, bool],
    is_weighted: bool, folder: Path, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    place = tmp_path_factory.mktemp("text")
    (place / "a.txt").write_bytes(b" \n" * 40_000 + (b"\n" * 66_000).join(texts))
    (place / "b.txt").write_bytes(b"w0")
    sources = (
        write_lines(place / "a.jsonl", [*lines, b"w7"]),
        write_rows(place / "a.parquet", [*rows, b"w7"]),
        str(place),
    )
    weights = (1.0, 2.0, 1.0) if is_weighted else ()
    data = DataOptions(sources=sources, weights=weights, skip_bad_documents=True, **how)  # type: ignore[arg-type]
    whole = list(islice(read(data, folder, seq_len=seq_len), 12))
    counts = [batch.cursor.num_skipped for batch in whole if batch.cursor]
    assert counts == sorted(counts)
    for number in range(0, 12, 3):
        rest = islice(read(data, folder, seq_len=seq_len, cursor=whole[number].cursor), 11 - number)
        for found, expected in zip(rest, whole[number + 1 :], strict=True):
            assert torch.equal(found.tokens, expected.tokens)
            assert found.cursor == expected.cursor


def test_one_pass_skips_counts_and_tells_every_bad_document_once(folder: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [GOOD[0], *(line for line, _ in BAD_LINES), GOOD[1]])
    rows = write_rows(tmp_path / "b.parquet", [GOOD[2], *(row for row, _ in BAD_ROWS)])
    (tmp_path / "c.txt").write_bytes(b"w1\n" * 30_000 + b"\xff\n" + b"w2\n")
    told: list[str] = []
    skipped = Skipped(on_skip=lambda error: told.append(error.where))
    data = DataOptions(sources=(lines, rows, str(tmp_path / "c.txt")), skip_bad_documents=True)
    batch = BatchOptions(global_batch=1, microbatch=1, seq_len=5)
    found = list(read_once(data, batch, folder=folder, vocab_size=VOCAB_SIZE, skipped=skipped))
    labels = [label for each in found for label in each.labels.flatten().tolist() if label != IGNORED]
    assert [where.removeprefix(f"{tmp_path}/") for where in told] == [
        *(f"a.jsonl:{number}" for number in range(2, 11)), *(f"b.parquet: row {number}" for number in (2, 3, 4)),
        "c.txt:30001",
    ]  # fmt: skip
    assert skipped.count == 13
    # A text file is left out from the piece on that is no text; what came before it is a document that ends.
    good = ([1, 2, 3], [4], [5, 6])
    begun = [token for words in good for token in (BOS, *(FIRST + word for word in words), EOS)][1:]
    assert labels[: len(begun)] == begun
    rest = labels[len(begun) :]
    assert (rest[0], set(rest[1:-1]), rest[-1]) == (BOS, {FIRST + 1}, EOS)


def test_long_line_is_text_that_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{" * (16 << 20))
    tracemalloc.start()
    try:
        assert has_text(tmp_path / "a.jsonl", Fields())
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
