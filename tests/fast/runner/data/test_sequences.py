"""Documents become sequences: nothing lost, nothing twice, the same every time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import InputError
from runner.config.schema import BatchOptions, DataOptions
from runner.data.rows import RowForm, Skipped
from runner.data.sequences import IGNORED, Batch, read_batches, read_once
from runner.data.tokenizer import load_tokenizer, load_vocabulary, special_id
from runner.evaluation.evaluate import mean_loss
from tests.fast.runner.data.golden import cases, digests, write_sources
from tests.fast.runner.data.words import BOS, EOS, FIRST, VOCAB_SIZE, WORDS, write_documents, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read(source: str, folder: Path, *, pack: bool, batch: BatchOptions, start: int = 0) -> Iterator[Batch]:
    data = DataOptions(sources=(source,), pack=pack)
    return read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE, start=start)


DOCUMENTS = st.lists(st.lists(st.integers(0, len(WORDS) - 1), max_size=12), min_size=1, max_size=6).filter(any)


def ids_of(documents: list[list[int]]) -> list[list[int]]:
    return [[BOS, *(FIRST + word for word in document), EOS] for document in documents if document]


@given(documents=DOCUMENTS, seq_len=st.integers(1, 9), global_batch=st.integers(1, 3))
def test_packed_sequences_are_the_documents_end_to_end_over_and_over(
    documents: list[list[int]], seq_len: int, global_batch: int, folder: Path
) -> None:
    source = write_documents(folder / "data.jsonl", documents)
    batch = BatchOptions(global_batch=global_batch, microbatch=1, seq_len=seq_len)
    found = list(islice(read(source, folder, pack=True, batch=batch), 4))
    tokens = torch.cat([each.tokens.flatten() for each in found])
    stream = [token for document in ids_of(documents) for token in document]
    endless = torch.tensor(stream * (len(tokens) // len(stream) + 2))
    assert torch.equal(tokens, endless[: len(tokens)])
    labels = torch.cat([each.labels.flatten() for each in found])
    assert torch.equal(labels, endless[1 : len(tokens) + 1])
    assert all(each.tokens.shape == each.labels.shape == (global_batch, seq_len) for each in found)
    assert all(each.num_tokens == global_batch * seq_len for each in found)


@given(documents=DOCUMENTS, seq_len=st.integers(1, 9), global_batch=st.integers(1, 3))
def test_masked_documents_have_positions_from_0_and_do_not_predict_each_other(
    documents: list[list[int]], seq_len: int, global_batch: int, folder: Path
) -> None:
    source = write_documents(folder / "data.jsonl", documents)
    batch = BatchOptions(global_batch=global_batch, microbatch=1, seq_len=seq_len)
    data = DataOptions(sources=(source,), document_mask=True)
    found = list(islice(read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE), 4))
    plain = list(islice(read(source, folder, pack=True, batch=batch), 4))
    length = 4 * global_batch * seq_len + 1
    places = [place for document in ids_of(documents) for place in range(len(document))]
    endless = (places * (length // len(places) + 1))[:length]
    for number, (masked, whole) in enumerate(zip(found, plain, strict=True)):
        assert masked.positions is not None
        assert torch.equal(masked.tokens, whole.tokens)
        assert whole.positions is None
        for row in range(global_batch):
            begin = (number * global_batch + row) * seq_len
            in_document = endless[begin : begin + seq_len + 1]
            firsts = [place for place in range(1, seq_len + 1) if in_document[place] == 0]
            expected = [place - max([0, *(first for first in firsts if first <= place)]) for place in range(seq_len)]
            assert masked.positions[row].tolist() == expected
            ignored = [first - 1 for first in firsts]
            assert (masked.labels[row] == IGNORED).nonzero().flatten().tolist() == ignored
            counted = masked.labels[row] != IGNORED
            assert torch.equal(masked.labels[row][counted], whole.labels[row][counted])
        assert masked.num_tokens == max(1, int((masked.labels != IGNORED).sum()))
        assert masked.num_documents == whole.num_documents == int((masked.positions == 0).sum())
    if found[0].cursor is not None:
        resumed = read_batches(
            data, batch, folder=folder, vocab_size=VOCAB_SIZE, start=global_batch, cursor=found[0].cursor
        )
        again = next(resumed)
        assert all(map(torch.equal, again.tensors, found[1].tensors))


@given(documents=DOCUMENTS, seq_len=st.integers(1, 9))
def test_padded_sequences_are_one_document_each(documents: list[list[int]], seq_len: int, folder: Path) -> None:
    source = write_documents(folder / "data.jsonl", documents)
    expected = ids_of(documents)
    batch = BatchOptions(global_batch=len(expected), microbatch=1, seq_len=seq_len)
    first, second = islice(read(source, folder, pack=False, batch=batch), 2)
    assert torch.equal(first.tokens, second.tokens)
    for tokens, labels, ids in zip(first.tokens.tolist(), first.labels.tolist(), expected, strict=True):
        kept = min(seq_len, len(ids) - 1)
        assert tokens[:kept] == ids[:kept]
        assert labels == ids[1 : kept + 1] + [IGNORED] * (seq_len - kept)
    assert first.num_tokens == sum(min(seq_len, len(ids) - 1) for ids in expected)


@given(documents=DOCUMENTS, seq_len=st.integers(1, 9), global_batch=st.integers(1, 3), pack=st.booleans())
def test_reading_once_counts_every_token_once(
    documents: list[list[int]], seq_len: int, global_batch: int, pack: bool, folder: Path
) -> None:
    source = write_documents(folder / "data.jsonl", documents)
    batch = BatchOptions(global_batch=global_batch, microbatch=1, seq_len=seq_len)
    data = DataOptions(sources=(source,), pack=pack)
    found = list(read_once(data, batch, folder=folder, vocab_size=VOCAB_SIZE))
    labels = torch.cat([each.labels.flatten() for each in found])
    counted = [label for label in labels.tolist() if label != IGNORED]
    expected = ids_of(documents)
    if pack:
        assert counted == [token for document in expected for token in document][1:]
    else:
        assert counted == [token for document in expected for token in document[1 : seq_len + 1]]
    assert all(each.tokens.shape == (global_batch, seq_len) for each in found)
    assert sum(each.num_tokens for each in found) == len(counted)


@pytest.mark.parametrize("pack", [True, False])
def test_text_without_a_token_is_refused(pack: bool, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n \n")
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    batch = BatchOptions(global_batch=1, microbatch=1, seq_len=4)
    with pytest.raises(InputError) as error:
        next(read(str(tmp_path), folder, pack=pack, batch=batch))
    assert (error.value.where, error.value.code) == (str(tmp_path), "data.empty")


def test_token_beyond_the_vocabulary_is_refused_by_its_document(folder: Path) -> None:
    source = write_documents(folder / "data.jsonl", [[0, 1], [2, 7]])
    data = DataOptions(sources=(source,))
    batch = BatchOptions(global_batch=1, microbatch=1, seq_len=4)
    batches = read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(InputError) as error:
        list(islice(batches, 9))
    assert (error.value.where, error.value.code) == (f"{source}:2", "tokenizer.beyond-vocabulary")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"bos_token_id": 2, "eos_token_id": [5, 6]}}, (2, 5)),
        ({"config.json": {"eos_token_id": 4, "bos_token_id": 4}}, (4, 4)),
        ({"config.json": {"bos_token_id": 3}, "generation_config.json": {"eos_token_id": 3}}, (3, 3)),
        (
            {
                "config.json": {},
                "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}},
            },
            (0, 1),
        ),
    ],
)
def test_special_tokens_come_from_the_first_file_that_names_them(
    files: dict[str, Any], expected: tuple[int, int], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    assert (special_id(tmp_path, tokenizer, "bos"), special_id(tmp_path, tokenizer, "eos")) == expected


def test_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    def refusal() -> tuple[str, str]:
        with pytest.raises(InputError) as error:
            load_vocabulary(tmp_path, VOCAB_SIZE)
        return error.value.where.removeprefix(str(tmp_path)), error.value.code

    assert refusal() == ("/tokenizer.json", "tokenizer.missing")
    (tmp_path / "tokenizer.json").touch()
    assert refusal() == ("/tokenizer.json", "tokenizer.broken")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refusal() == ("/tokenizer.json", "tokenizer.broken")
    write_tokenizer(tmp_path, eos_token_id=None)
    assert refusal() == ("", "tokenizer.no-special-token")
    write_tokenizer(tmp_path, eos_token_id=99)
    assert refusal() == ("", "tokenizer.beyond-vocabulary")
    write_tokenizer(tmp_path, eos_token_id="none")
    assert refusal() == ("", "tokenizer.no-special-token")
    write_tokenizer(tmp_path, eos_token_id=-1)
    assert refusal() == ("/config.json: eos_token_id", "tokenizer.special-token")


def test_data_that_cannot_be_opened_is_refused_before_its_first_batch_is_read(folder: Path) -> None:
    batch, data = BatchOptions(global_batch=2, microbatch=1, seq_len=6), DataOptions(sources=(str(folder / "none"),))
    with pytest.raises(InputError) as error:
        read_once(data, batch, folder=folder, vocab_size=VOCAB_SIZE)
    assert error.value.code == "data.no-files"


def test_rows_of_one_length_are_read_together_and_nothing_to_predict_is_refused(folder: Path) -> None:
    source = write_documents(folder / "data.jsonl", [[1], [2, 3], [4], [5, 6, 7]])
    batch = BatchOptions(global_batch=2, microbatch=1, seq_len=6)
    data = DataOptions(sources=(source,), pack=False)

    def to_even(length: int, most: int) -> int:
        return length + length % 2

    found = list(read_once(data, batch, folder=folder, vocab_size=VOCAB_SIZE, padded_length=to_even))
    assert [each.tokens.shape for each in found] == [(2, 2), (2, 4)]  # of 2 and 2, of 3 and 4 tokens
    assert [each.num_tokens for each in found] == [4, 7]
    with pytest.raises(InputError) as error:
        mean_loss(lambda _: 0.0, (), "--eval-data")
    assert (error.value.code, error.value.where) == ("data.no-tokens", "--eval-data")
    with pytest.raises(InputError) as not_finite:
        mean_loss(lambda _: (float("nan"), 1.0), found)
    assert not_finite.value.code == "model.not-finite"


def test_evaluation_by_a_loss_of_ones_own_counts_no_token_of_rows_without_labels(tmp_path: Path) -> None:
    unlabeled, labeled = 4 * [{"input_ids": [3, 4], "loss_mask": [0, 0]}], 2 * [{"input_ids": [3, 4, 5]}]
    batch, source = BatchOptions(global_batch=2, microbatch=1, seq_len=6), tmp_path / "rows.jsonl"
    data = DataOptions(sources=(str(source),), is_tokenized=True)

    def evaluate(count: float, records: Iterable[object]) -> tuple[float, int]:
        source.write_text("\n".join(map(json.dumps, records)))
        batches = read_once(data, batch, folder=tmp_path, vocab_size=VOCAB_SIZE, form=RowForm())
        return mean_loss(lambda _: (3.0, count), batches)

    assert evaluate(2.0, [*unlabeled, *labeled]) == (3.0, 4)  # sums of 3, 3 and 12, and 6 counted
    assert evaluate(2.0, unlabeled) == (1.5, 0)
    with pytest.raises(InputError) as error:
        evaluate(0.0, unlabeled)
    assert error.value.code == "data.no-tokens"


@pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted in /proc")
@pytest.mark.parametrize("shuffle", [True, False])
def test_bytes_read_grow_with_the_documents_and_not_with_their_square(
    shuffle: bool, tmp_path: Path, folder: Path
) -> None:
    source = write_documents(tmp_path / "a.jsonl", [[number % 8] * 20 for number in range(2000)])
    data, batch = (
        DataOptions(sources=(source,), shuffle=shuffle),
        BatchOptions(global_batch=1, microbatch=1, seq_len=22),
    )
    batches = read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE)
    begun = bytes_read()
    assert sum(1 for _ in islice(batches, 1990)) == 1990
    blocks = 2000 * (64 << 10) if shuffle else 0  # a shuffled line is read by itself, in a block of a buffer's size
    assert bytes_read() - begun < 3 * Path(source).stat().st_size + blocks


@pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted in /proc")
@pytest.mark.parametrize("shuffle", [True, False])
def test_bytes_read_for_lines_that_are_skipped_do_not_grow_with_their_square(
    shuffle: bool, tmp_path: Path, folder: Path
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "w1 w2 w3"}\n{"text": null, "more": "%s"}\n' % ("x" * 2000) * 1000)
    data = DataOptions(sources=(str(source),), shuffle=shuffle, skip_bad_documents=True)
    batch, skipped, places = BatchOptions(global_batch=1, microbatch=1, seq_len=5), Skipped(), set[str]()
    skipped.on_skip = lambda error: places.add(error.where)
    batches = read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE, skipped=skipped)
    begun, size = bytes_read(), source.stat().st_size
    list(islice(batches, 950))
    blocks = 2000 * (64 << 10) if shuffle else 0
    assert bytes_read() - begun < (30 if shuffle else 3) * size + blocks
    assert len(places) > 900
    assert places < {f"{source}:{number}" for number in range(2, 2002, 2)}


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


# Batches are those of the version that read and tokenized each of them within its step, bit for bit.


GOLDEN: dict[str, list[str]] = json.loads(Path(__file__).with_name("golden_batches.json").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("golden")
    write_sources(place)
    return place


@pytest.mark.parametrize("name", GOLDEN)
def test_batches_are_as_before_from_their_first_and_from_any_cursor_on(name: str, place: Path) -> None:
    case, skipped = cases()[name], Skipped()
    options, batch, folder = case.options(place), case.batch, place / "tokenizer"
    whole = list(islice(
        read_batches(options, batch, folder=folder, vocab_size=10, start=case.start, skipped=skipped), len(GOLDEN[name])
    ))  # fmt: skip
    assert digests(whole) == GOLDEN[name]
    if (cursor := whole[3].cursor) is not None:
        rest = read_batches(
            options, batch, folder=folder, vocab_size=10, cursor=cursor, skipped=Skipped(count=cursor.num_skipped)
        )
        assert digests(islice(rest, 4)) == GOLDEN[name][4:]
