"""Data goes on at a cursor as if it had not stopped, and what lies before is not looked at."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from manifests.errors import InputError
from manifests.schema import DataCursor, SourcePosition
from runner.config.schema import BatchOptions, DataOptions
from runner.data.documents import draw
from runner.data.sequences import Batch, read_batches
from tests.fast.runner.data.words import EOS, FIRST, VOCAB_SIZE, WORDS, text_of, write_documents, write_tokenizer

DOCUMENTS = st.lists(st.lists(st.integers(0, len(WORDS) - 1), max_size=9), min_size=1, max_size=7).filter(any)
FILES = ("a.jsonl", "b.parquet", "c.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read(
    data: DataOptions, folder: Path, *, seq_len: int, rows: int = 1, cursor: DataCursor | None = None, start: int = 0
) -> Iterator[Batch]:
    batch = BatchOptions(global_batch=rows, microbatch=1, seq_len=seq_len)
    return read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE, start=start, cursor=cursor)


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.labels, other.labels)
        assert one.cursor == other.cursor is not None


def position_of(batch: Batch) -> SourcePosition:
    """Give where the only source was left."""
    assert batch.cursor is not None
    (position,) = batch.cursor.sources
    return position


def number_as_words(number: int) -> list[int]:
    return [int(digit) for digit in f"{number:05o}"]


def numbers_in(batch: Batch) -> list[int]:
    """Give the documents, made by `number_as_words`, that the rows of a batch hold, one each."""
    return [int("".join(str(token - FIRST) for token in row[1:6]), 8) for row in batch.tokens.tolist()]


@settings(max_examples=25)
@given(
    files=st.lists(st.tuples(st.sampled_from(FILES), DOCUMENTS), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
    how=st.fixed_dictionaries({"pack": st.booleans(), "shuffle": st.booleans(), "seed": st.integers(0, 9)}),
    is_weighted=st.booleans(),
    seq_len=st.integers(1, 9),
    rows=st.integers(1, 2),
)
def test_going_on_at_any_cursor_gives_what_comes_without_stopping(
    files: list[tuple[str, list[list[int]]]], weights: list[float], how: dict[str, Any], is_weighted: bool,
    seq_len: int, rows: int, folder: Path,
) -> None:  # fmt: skip
    sources = tuple(write_documents(folder / f"{number}{name}", texts) for number, (name, texts) in enumerate(files))
    data = DataOptions(sources=sources, weights=tuple(weights[: len(sources)]) if is_weighted else (), **how)
    whole = list(islice(read(data, folder, seq_len=seq_len, rows=rows), 8))
    for number, batch in enumerate(whole):
        rest = read(data, folder, seq_len=seq_len, rows=rows, cursor=batch.cursor, start=(number + 1) * rows)
        assert_equal(list(islice(rest, 7 - number)), whole[number + 1 :])
    # A checkpoint without a cursor has the number alone.
    assert_equal(list(islice(read(data, folder, seq_len=seq_len, rows=rows, start=3 * rows), 5)), whole[3:])


@pytest.mark.parametrize("shuffle", [True, False])
def test_going_on_within_a_text_file_of_many_pieces(shuffle: bool, tmp_path: Path, folder: Path) -> None:
    words = text_of(random.Random(0).choices(range(8), k=40_000))
    (tmp_path / "a.txt").write_text(" \n" * 50_000 + words + "\n" * 70_000 + words + " " * 140_000)
    (tmp_path / "b.txt").write_text(words[:600])
    data = DataOptions(sources=(str(tmp_path),), shuffle=shuffle)
    whole = list(islice(read(data, folder, seq_len=16_000), 10))
    assert max(position_of(batch).offset for batch in whole) > 300_000
    assert position_of(whole[-1]).epoch > 0
    for number, batch in enumerate(whole[:-1]):
        assert_equal([next(read(data, folder, seq_len=16_000, cursor=batch.cursor))], whole[number + 1 : number + 2])


@pytest.mark.parametrize("pack", [True, False])
def test_lines_before_the_cursor_are_not_read(pack: bool, tmp_path: Path, folder: Path) -> None:
    source = Path(write_documents(tmp_path / "a.jsonl", [number_as_words(number) for number in range(40)]))
    data = DataOptions(sources=(str(source),), pack=pack)
    whole = list(islice(read(data, folder, seq_len=11), 20))
    for number in (3, 9, 15):
        offset = position_of(whole[number]).offset
        source.write_bytes(b"x" * offset + source.read_bytes()[offset:])
        rest = read(data, folder, seq_len=11, cursor=whole[number].cursor)
        assert_equal(list(islice(rest, 19 - number)), whole[number + 1 :])
    with pytest.raises(InputError) as error:
        next(read(data, folder, seq_len=11, start=4))
    assert error.value.code == "data.not-json"


def test_rows_before_the_cursor_are_not_tokenised(tmp_path: Path, folder: Path) -> None:
    source, texts = tmp_path / "a.parquet", [text_of(number_as_words(number)) for number in range(40)]
    parquet.write_table(pyarrow.table({"text": texts}), source, row_group_size=8)
    data = DataOptions(sources=(str(source),), pack=False)
    whole = list(islice(read(data, folder, seq_len=8, rows=5), 8))
    parquet.write_table(pyarrow.table({"text": [None] * 15 + texts[15:]}), source, row_group_size=8)
    rest = read(data, folder, seq_len=8, rows=5, cursor=whole[2].cursor)
    assert_equal(list(islice(rest, 5)), whole[3:])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_every_shuffled_pass_has_each_document_once_in_an_order_of_its_own(
    name: str, tmp_path: Path, folder: Path
) -> None:
    documents = [number_as_words(number) for number in range(60)]
    source = write_documents(tmp_path / name, documents, group=20)

    def passes(seed: int) -> list[tuple[int, ...]]:
        data = DataOptions(sources=(source,), shuffle=True, pack=False, seed=seed)
        return [tuple(numbers_in(batch)) for batch in islice(read(data, folder, seq_len=8, rows=60), 3)]

    found = [*passes(0), *passes(1)]
    assert all(sorted(order) == list(range(60)) for order in found)
    assert len({*found, tuple(range(60))}) == 7
    assert passes(0) == found[:3]


@pytest.mark.parametrize("shuffle", [True, False])
def test_documents_are_drawn_by_weight_and_each_source_goes_round_by_itself(
    shuffle: bool, tmp_path: Path, folder: Path
) -> None:
    firsts, sizes, weights = (0, 100, 200), (7, 11, 5), (1.0, 4.0, 0.0)
    sources = tuple(
        write_documents(tmp_path / f"{first}.jsonl", [number_as_words(first + number) for number in range(size)])
        for first, size in zip(firsts, sizes, strict=True)
    )
    data = DataOptions(sources=sources, weights=weights, pack=False, shuffle=shuffle, seed=3)
    found = numbers_in(next(read(data, folder, seq_len=8, rows=2000)))
    drawn = [number // 100 for number in found]
    assert drawn == [draw(weights, 3, number) for number in range(2000)]
    assert abs(Counter(drawn)[1] - 1600) < 4 * (2000 * 0.8 * 0.2) ** 0.5
    for first, size in zip(firsts[:2], sizes[:2], strict=True):
        own = [number - first for number in found if number // 100 == first // 100]
        passes = [own[begin : begin + size] for begin in range(0, len(own) - size, size)]
        assert all(sorted(order) == list(range(size)) for order in passes)
        assert any(order != list(range(size)) for order in passes) == shuffle
        assert not shuffle or any(one != other for one, other in pairwise(passes))


@pytest.mark.parametrize(
    ("num_tokens", "position"),
    [(99, SourcePosition(epoch=0, item=0, offset=0)), (0, SourcePosition(epoch=0, item=2, offset=0))],
)
def test_cursor_beyond_the_data_is_refused(
    num_tokens: int, position: SourcePosition, tmp_path: Path, folder: Path
) -> None:
    source = write_documents(tmp_path / "a.jsonl", [[1, 2, 3]])
    cursor = DataCursor(num_documents=0, num_tokens=num_tokens, sources=(position,))
    with pytest.raises(InputError) as error:
        next(read(DataOptions(sources=(source,)), folder, seq_len=4, cursor=cursor))
    assert (error.value.where, error.value.code) == (source, "data.shorter")


@pytest.mark.parametrize("shuffle", [True, False])
def test_memory_does_not_grow_with_the_text(shuffle: bool, tmp_path: Path, folder: Path) -> None:
    num_documents, line = 20_000, json.dumps({"text": text_of(range(8)) + 1000 * " "}) + "\n"
    (tmp_path / "a.jsonl").write_text(num_documents * line)
    data = DataOptions(sources=(str(tmp_path / "a.jsonl"),), shuffle=shuffle)
    batches = None
    tracemalloc.start()
    try:
        batches = list(islice(read(data, folder, seq_len=63, rows=4), 20))
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert int(batches[0].labels[0, 8]) == EOS
    assert peak_nbytes < 3 << 20  # of 20 MB; a scan's buffer is 1 MiB, the index 160 kB
