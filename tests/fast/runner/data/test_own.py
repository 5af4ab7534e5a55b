"""What a dataset of a package's own may yield, and what is refused of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from manifests.errors import CheckpointError, DataError
from runner.checkpoint.data_position import read_state
from runner.config.schema import BatchOptions, DataOptions
from runner.data import own
from runner.data.own import SharedCounts, read_dataset
from runner.data.sequences import Batch, Rows

ROW = {"input_ids": [1, 2]}
BATCH = BatchOptions(global_batch=2, microbatch=1, seq_len=8)


def read(monkeypatch: pytest.MonkeyPatch, rows: Any, state: Any) -> Batch:
    class Own:
        def __init__(self, request: Any) -> None: ...

        def read(self, before: Any) -> Iterator[tuple[Any, Any]]:
            yield rows, state

    monkeypatch.setattr(own, "load_entry_point", lambda *names: Own)
    data = DataOptions(sources=("x",), dataset="own")
    counts = SharedCounts(None)
    return next(read_dataset(data, BATCH, None, Rows(), None, counts, folder=Path(), vocab_size=50))


@pytest.mark.parametrize("state", [{"a": [1, 0.5]}, 0, "x", []])
def test_state_that_json_keeps_is_stored(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read(monkeypatch, (row for row in (ROW, ROW)), state)
    assert batch.state is not None
    assert batch.tokens[:, :2].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("state", [None, {1: 2}, [(1, 2)], float("nan"), {1, 2}])
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


def test_checkpoint_without_the_state_of_the_dataset_is_refused(tmp_path: Path) -> None:
    packed = SimpleNamespace(root=tmp_path, manifest=SimpleNamespace(files=()))
    with pytest.raises(CheckpointError) as error:
        read_state(cast("Any", packed))
    assert error.value.code == "resume.other-data"
