"""Batches are those of the version that read and tokenized each of them within its step, bit for bit."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from runner.data.bad import Skipped
from runner.data.sequences import read_batches
from tests.fast.runner.data.golden import cases, digests, write_sources

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
