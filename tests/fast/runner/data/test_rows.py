"""Rows of token ids, and prompts with completions: which tokens count in the loss, and what is refused."""

from __future__ import annotations

import errno
import json
from array import array
from collections import UserDict
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from manifests.errors import CheckpointError, DataError, UsageError, UserError
from runner.checkpoint.data_position import read_state
from runner.config.schema import BatchOptions, DataOptions, FramingOptions
from runner.data import own
from runner.data.own import SharedCounts, read_dataset
from runner.data.rows import IGNORED, BadDocumentError, RowForm, Skipped, parse_row
from runner.data.sequences import WHOLE_BATCH, Batch, Rows, read_batches, read_once
from tests.fast.runner.data.words import BOS, EOS, FIRST, VOCAB_SIZE, WORDS, write_tokenizer

BATCH = BatchOptions(global_batch=2, microbatch=1, seq_len=6)
RECORDS: list[dict[str, Any]] = [
    {"input_ids": [2, 3, 4, 5], "labels": [IGNORED, IGNORED, 4, 5]},
    {"input_ids": [6, 7, 8], "loss_mask": [0, 1, 1]},
    {"input_ids": [9, 8, 7, 6, 5, 4]},
]
TOKENS = [[2, 3, 4, 5, 0, 0], [6, 7, 8, 0, 0, 0], [9, 8, 7, 6, 5, 4]]
LABELS = [[IGNORED, 4, 5, *3 * [IGNORED]], [7, 8, *4 * [IGNORED]], [8, 7, 6, 5, 4, IGNORED]]


def write(file: Path, records: list[dict[str, Any]]) -> str:
    if file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, records)))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(records), file, row_group_size=2)
    return str(file)


def rows_in(source: str, *, count: int = 1, folder: Path | None = None, **options: Any) -> list[Batch]:
    data = DataOptions(sources=(source,), **options)
    batches = read_batches(data, BATCH, folder=folder or Path(), vocab_size=VOCAB_SIZE)
    return list(islice(batches, count))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_sequences_whose_labels_or_mask_say_which_tokens_count(tmp_path: Path, suffix: str) -> None:
    names = {name: None for record in RECORDS for name in record}
    records = [{**names, **record} for record in RECORDS] if suffix == ".parquet" else RECORDS
    first, second = rows_in(write(tmp_path / f"rows{suffix}", records), count=2, is_tokenized=True)
    assert [*first.tokens.tolist(), *second.tokens.tolist()] == [*TOKENS, TOKENS[0]]
    assert [*first.labels.tolist(), *second.labels.tolist()] == [*LABELS, LABELS[0]]
    assert (first.num_tokens, second.num_tokens, first.positions) == (4, 7, None)


def test_rows_shuffled_or_of_one_rank_are_whole_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.parquet", [{"input_ids": [number, number]} for number in range(VOCAB_SIZE)])
    batches = rows_in(source, count=VOCAB_SIZE // 2, is_tokenized=True, shuffle=True)
    assert sorted(row[0] for batch in batches for row in batch.tokens.tolist()) == list(range(VOCAB_SIZE))
    data = DataOptions(sources=(source,), is_tokenized=True)
    second = next(read_batches(data, BATCH, folder=tmp_path, vocab_size=VOCAB_SIZE, rows=Rows(number=1, count=2)))
    assert (second.tokens[:, 0].tolist(), second.num_tokens) == ([1], 2)


def test_rows_of_several_documents_have_their_positions_and_predict_none_of_the_next(tmp_path: Path) -> None:
    records = [
        {"input_ids": [2, 3, 4, 5], "document_ids": [7, 7, 9, 9]},
        {"input_ids": [2, 3, 4, 5, 6], "position_ids": [0, 0, 1, 2, 0]},
    ]
    (batch,) = rows_in(write(tmp_path / "rows.jsonl", records), is_tokenized=True, document_mask=True)
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 0, 1]]
    assert batch.labels.tolist() == [[3, IGNORED, 5, *3 * [IGNORED]], [IGNORED, 4, 5, *3 * [IGNORED]]]
    assert (batch.num_tokens, batch.num_documents) == (4, 5)


@pytest.mark.parametrize("value", [pytest.param(10**400, id="long"), -1e300, float("nan"), float("inf"), "1", None])
def test_fields_of_the_loss_are_finite_numbers(value: object) -> None:
    for form, field in ((RowForm(per_token=("a",)), [1, value]), (RowForm(per_row=("a",)), value)):
        with pytest.raises(BadDocumentError) as error:
            parse_row({"input_ids": [1, 2], "a": field}, form, str)
        assert error.value.code == "data.bad-row"


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({}, "null"),
        ({"one": "1"}, "a string"),
        ({"one": [1]}, "a list"),
        ({"one": np.float64(1)}, "a float64"),
        ({"one": 1, "each": [1, None]}, "null"),
        ({"one": 1, "each": [1, "1"]}, "a string"),
        ({"input_ids": [1, 0.5]}, "a floating-point number"),
        ({"input_ids": [1, True]}, "true or false"),
        ({"labels": [None, 1]}, "null"),
    ],
)
def test_first_value_that_is_no_number_is_named(record: Mapping[str, Any], kind: str) -> None:
    form = RowForm(per_token=("each",), per_row=("one",))
    with pytest.raises(BadDocumentError) as error:
        parse_row({"input_ids": [1, 2], "each": [1, 2], **record}, form, str)
    assert error.value.problem.endswith(f", found {kind}")


def test_rows_without_labels_are_evaluated_by_own_losses(tmp_path: Path) -> None:
    records = [RECORDS[0], {"input_ids": [3, 4], "loss_mask": [0, 0]}, *RECORDS[1:]]
    data = DataOptions(sources=(write(tmp_path / "rows.jsonl", records),), is_tokenized=True)
    batches = read_once(data, BATCH, folder=tmp_path, vocab_size=VOCAB_SIZE, form=RowForm())
    assert [row[0] for batch in batches for row in batch.tokens.tolist()] == [2, 3, 6, 9]


@pytest.mark.parametrize(
    "record",
    [
        {"labels": [1]},
        {"input_ids": []},
        {"input_ids": 7 * [1]},
        {"input_ids": [1, VOCAB_SIZE]},
        {"input_ids": [1, -1]},
        {"input_ids": [1, 0.5]},
        {"input_ids": [1, True]},
        {"input_ids": [1, 2], "labels": [False, True]},
        {"input_ids": [1, 2], "labels": [1]},
        {"input_ids": [1, 2], "labels": [1, -1]},
        {"input_ids": [1, 2], "loss_mask": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [1, 1], "labels": [1, 2]},
        {"input_ids": [1, 2], "document_ids": [0, 1]},
        {"input_ids": [1, 2], "position_ids": [1, 2]},
        {"input_ids": [2, 3, 0], "attention_mask": [1, 1, 0]},
        {"input_ids": [2, 3, 0], "attention_mask": [1, 1, 0], "labels": [2, 3, 0]},
        {"input_ids": [0, 2, 3], "attention_mask": [0, 1, 1], "loss_mask": [0, 1, 1]},
        {"input_ids": [2, 3, 4], "attention_mask": [1, 2, 2]},
        {"input_ids": [2, 3], "attention_mask": [1]},
        {"input_ids": [2, 3], "completion_mask": [0, 1]},
        {"input_ids": [2, 3], "assistant_masks": [0, 1]},
        {"input_ids": [2, 3], "seq_lengths": [1, 1]},
    ],
)
def test_bad_row_is_refused_by_line_or_skipped(tmp_path: Path, record: Mapping[str, Any]) -> None:
    source = write(tmp_path / "rows.jsonl", [RECORDS[1], dict(record)])
    with pytest.raises(DataError) as error:
        rows_in(source, is_tokenized=True)
    assert (error.value.code, error.value.where) == ("data.bad-row", f"{source}:2")
    if {"completion_mask", "seq_lengths"} & record.keys():  # as columns, too
        with pytest.raises(DataError) as of_column:
            rows_in(write(tmp_path / "rows.parquet", [dict(record)]), is_tokenized=True)
        assert of_column.value.code == "data.bad-row"
    data = DataOptions(sources=(source,), is_tokenized=True, skip_bad_documents=True)
    skipped = Skipped()
    batches = list(read_once(data, BATCH, folder=tmp_path, vocab_size=VOCAB_SIZE, skipped=skipped))
    assert (len(batches), skipped.count) == (1, 1)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_fields_of_other_programs_change_nothing_beside_those_that_are_read(tmp_path: Path, suffix: str) -> None:
    record = {"input_ids": [2, 3, 4, 5], "labels": [IGNORED, 3, 4, 5], "position_ids": [0, 1, 0, 1]}
    more = {"assistant_masks": [0, 1, 1, 1], "seq_lengths": [2, 2]}
    rows = [
        rows_in(write(tmp_path / f"{number}{suffix}", [each]), is_tokenized=True, document_mask=True)[0]
        for number, each in enumerate((record, {**record, **more}))
    ]
    assert rows[0].labels.tolist() == rows[1].labels.tolist()
    assert rows[0].num_tokens == rows[1].num_tokens


def test_padding_that_does_not_count_is_as_no_padding(tmp_path: Path) -> None:
    """As a tokenizer of transformers writes rows of one length: a mask that changes nothing is no error."""
    padded: list[dict[str, Any]] = [
        {"input_ids": TOKENS[0], "attention_mask": [1, 1, 1, 1, 0, 0], "labels": [IGNORED, *LABELS[0][:5]]},
        {"input_ids": [6, 7, 8, 0], "attention_mask": [1, 1, 1, 0], "loss_mask": [0, 1, 1, 0]},
    ]
    for name in ("rows.jsonl", "rows.parquet"):
        records = [{"labels": None, "loss_mask": None, **record} for record in padded]
        (batch,) = rows_in(write(tmp_path / name, records), is_tokenized=True)
        assert (batch.tokens.tolist(), batch.labels.tolist()) == (TOKENS[:2], LABELS[:2])


@pytest.mark.parametrize("name", ["text", "input_ids", "labels"])
def test_columns_of_one_name_are_refused(name: str, tmp_path: Path) -> None:
    values = pyarrow.array(["w1"] if name == "text" else [[1, 2]])
    columns = {"text": [name] * 2, "input_ids": [name] * 2, "labels": ["input_ids", name, name]}[name]
    parquet.write_table(pyarrow.Table.from_arrays([values] * len(columns), names=columns), tmp_path / "a.parquet")
    folder = write_tokenizer(tmp_path / "tokenizer")
    for shuffle in (False, True):
        with pytest.raises(DataError) as error:
            rows_in(str(tmp_path / "a.parquet"), folder=folder, is_tokenized=name != "text", shuffle=shuffle)
        assert (error.value.where, error.value.code) == (str(tmp_path / "a.parquet"), "data.no-column")


def test_row_of_text_that_is_not_utf8_is_refused_by_its_number(tmp_path: Path) -> None:
    file, text = tmp_path / "rows.parquet", pyarrow.array([b"w1 \xff"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 1, text.buffers())
    parquet.write_table(pyarrow.table({"input_ids": column}), file)
    with pytest.raises(DataError) as error:
        rows_in(str(file), is_tokenized=True)
    assert (error.value.code, error.value.where) == ("data.not-utf8", f"{file}: row 1")


@pytest.mark.parametrize(
    "record",
    [
        {"input_ids": [1, 2], "document_ids": [0, 1], "position_ids": [0, 1]},
        {"input_ids": [1, 2, 3], "position_ids": [0, 5, 3]},
        {"input_ids": [1, 2, 3], "position_ids": [0, 1, 1]},
        {"input_ids": [1, 2], "position_ids": [0, -1]},
    ],
)
def test_positions_that_are_not_those_of_documents_are_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    source = write(tmp_path / "rows.jsonl", [record])
    with pytest.raises(DataError) as error:
        rows_in(source, is_tokenized=True, document_mask=True)
    assert error.value.code == "data.bad-row"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("pack", [True, False])
def test_prompts_and_what_frames_them_are_no_labels(tmp_path: Path, suffix: str, pack: bool) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    records = [{"q": "w0 w1", "a": "w2"}, {"q": "", "a": "w3 w4"}]
    source = write(tmp_path / f"pairs{suffix}", records)
    (batch,) = rows_in(source, folder=folder, text_field="q", completion_field="a", pack=pack)
    ids = [[BOS, FIRST, FIRST + 1, FIRST + 2, EOS], [BOS, FIRST + 3, FIRST + 4, EOS]]
    counts = [[0, 0, 0, 1, 1], [0, 1, 1, 1]]
    rows = list(zip(ids, counts, strict=True))
    if pack:
        stream, mask = [*ids[0], *ids[1]] * 2, [*counts[0], *counts[1]] * 2
        rows = [(stream[begin : begin + 7], mask[begin : begin + 7]) for begin in (0, 6)]
    for row, (tokens, mask) in enumerate(rows):
        expected = [token if counted else IGNORED for token, counted in zip(tokens, mask, strict=True)][1:]
        assert batch.tokens[row, : len(expected)].tolist() == tokens[:-1]
        assert batch.labels[row].tolist() == expected + (6 - len(expected)) * [IGNORED]
    assert batch.num_tokens == sum(sum(mask[1:]) for _, mask in rows)
    assert len(WORDS) == VOCAB_SIZE - FIRST


def test_text_files_have_neither_rows_nor_completions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w0")
    write_tokenizer(tmp_path)
    for options in ({"is_tokenized": True}, {"completion_field": "a"}):
        with pytest.raises(DataError) as error:
            rows_in(str(tmp_path / "a.txt"), folder=tmp_path, **options)
        assert error.value.code == "data.unknown-format"
    texts: tuple[dict[str, Any], ...] = ({"completion_field": "a"}, {"framing": FramingOptions(eos=True)})
    for reader in ({"is_tokenized": True}, {"dataset": "mine"}):
        for option in texts:
            with pytest.raises(UsageError) as conflict:
                DataOptions(sources=("a.jsonl",), **option, **reader)  # type: ignore[arg-type]
            assert conflict.value.code == "options.tokenized"


# What a dataset of a package's own may yield, and what is refused of it.


ROW = {"input_ids": [1, 2]}
DEEP = reduce(lambda inner, _: [inner], range(100_000), list[Any]())
OWN_BATCH = BatchOptions(global_batch=2, microbatch=1, seq_len=8)


def read(
    monkeypatch: pytest.MonkeyPatch,
    rows: Any,
    state: Any,
    exchange: Any = None,
    *,
    of: Rows = WHOLE_BATCH,
    form: RowForm | None = None,
    **options: Any,
) -> Batch:
    class Own:
        def __init__(self, request: Any) -> None: ...

        def read(self, before: Any) -> Iterator[tuple[Any, Any]]:
            yield rows, state

    monkeypatch.setattr(own, "load_entry_point", lambda *names: Own)
    data = DataOptions(sources=("x",), dataset="own", **options)
    counts = SharedCounts(exchange)
    return next(read_dataset(data, OWN_BATCH, form, of, None, counts, folder=Path(), vocab_size=50))


@pytest.mark.parametrize("state", [{"a": [1, 0.5]}, 0, "x", []])
def test_state_that_json_keeps_is_stored(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read(monkeypatch, (row for row in (ROW, ROW)), state)
    assert batch.state is not None
    assert batch.tokens[:, :2].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("state", [None, {1: 2}, [(1, 2)], float("nan"), {1, 2}, DEEP])
def test_state_that_json_changes_is_refused(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as error:
        read(monkeypatch, [ROW, ROW], state)
    assert (error.value.code, error.value.where) == ("data.dataset", "--data-class own")


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([[1, 2], [1, 2]], "data.dataset"),
        ([ROW], "data.dataset"),
        ([ROW, {"input_ids": (1, 2)}], "data.bad-row"),
        ([ROW, {"input_ids": array("i", [1, 2])}], "data.bad-row"),
    ],
)
def test_what_are_no_rows_is_refused(rows: Any, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as error:
        read(monkeypatch, rows, 1)
    assert error.value.code == code
    assert "a number" not in error.value.problem


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (KeyError("text"), "data.dataset"),
        (OSError(errno.EIO, "Input/output error"), "system.io"),
        (DataError("a.bin", "is short", code="data.unreadable"), "data.unreadable"),
        (None, "data.dataset"),
    ],
)
def test_what_the_code_of_a_dataset_raises_is_an_error_of_the_data(
    failure: Exception | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, request: Any) -> None: ...

        def read(self, before: Any) -> Iterator[Any]:
            if failure is not None:
                raise failure
            yield [{"input_ids": [1, 2]}]  # and no state

    refuse(Failing, code, monkeypatch)


def test_what_a_row_raises_as_it_is_read_is_an_error_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(UserDict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise KeyError(name)

    class WithLazyRows:
        def __init__(self, request: Any) -> None: ...

        def read(self, before: Any) -> Iterator[Any]:
            yield [Lazy(ROW), Lazy(ROW)], 1

    refuse(WithLazyRows, "data.dataset", monkeypatch)


def refuse(dataset: type, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """See that reading a dataset ends with an error of this code."""
    monkeypatch.setattr(own, "load_entry_point", lambda *names: dataset)
    data = DataOptions(sources=("x",), dataset="own")
    batches = read_dataset(data, OWN_BATCH, None, WHOLE_BATCH, None, SharedCounts(None), folder=Path(), vocab_size=50)
    with pytest.raises(UserError) as error:
        next(batches)
    assert error.value.code == code


def test_labels_and_documents_of_a_batch_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas with two stages each, whose rows are the same."""
    row = {"input_ids": [1, 2, 3, 4], "document_ids": [0, 0, 0, 1]}
    exchange = SimpleNamespace(gather=lambda share: [share, share, *2 * [(1, *share[1:])]])
    batch = read(monkeypatch, [row], 1, exchange, of=Rows(number=0, count=2), document_mask=True)
    assert (len(batch.tokens), batch.num_tokens, batch.num_documents) == (1, 2 * 2, 2 * 2)


FIELDS = RowForm(per_token=("a",))


class Exchanged:
    """What ranks that read one after the other have told so far."""

    def __init__(self) -> None:
        self.shares: list[Any] = []

    def gather(self, share: Any) -> list[Any]:
        self.shares.append(share)
        return self.shares


@pytest.mark.parametrize(
    "other",
    [{"input_ids": [4, 5, 6]}, {"labels": [1, 3, 2]}, {"document_ids": [0, 1, 1]}, {"a": [1, 2, 4]}],
)
def test_ranks_of_one_replica_with_other_rows_are_refused(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "document_ids": [0, 0, 1], "a": [1, 2, 3]}
    exchange = Exchanged()
    first = read(monkeypatch, [row, row], 1, exchange, form=FIELDS, document_mask=True)
    assert first.num_tokens == 2
    with pytest.raises(DataError) as error:
        read(monkeypatch, [row, {**row, **other}], 1, exchange, form=FIELDS, document_mask=True)
    assert error.value.code == "data.differs-between-ranks"


def test_states_that_differ_in_the_order_of_keys_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchanged()
    first, second = (
        read(monkeypatch, [ROW, ROW], state, exchange).state for state in ({"b": 2, "a": 1}, {"a": 1, "b": 2})
    )
    assert first == '{"b": 2, "a": 1}'
    assert second == '{"a": 1, "b": 2}'


def test_checkpoint_without_the_state_of_the_dataset_is_refused(tmp_path: Path) -> None:
    packed = SimpleNamespace(root=tmp_path, manifest=SimpleNamespace(files=()))
    with pytest.raises(CheckpointError) as error:
        read_state(cast("Any", packed))
    assert error.value.code == "resume.other-data"
