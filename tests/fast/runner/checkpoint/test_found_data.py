"""Where data goes on, which data may, and which ranks may read it together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from manifests.errors import InputError
from manifests.schema import DataCursor, DataPosition, SourcePosition
from runner.checkpoint.data_position import FoundData, check_alike, find_data
from runner.config.flags import TrainOptions, parse_training
from tests.fast.runner.data.words import write_tokenizer


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "more.txt"):
        (tmp_path / name).write_text("one two three")
    return tmp_path


def options(*args: str) -> TrainOptions:
    return parse_training(["--seq-len", "8", *args])


def find(*args: str, left: DataPosition | None = None, tokenizer: str = "blake3:one") -> FoundData:
    return find_data(options(*args), left, tokenizer)


def used(found: FoundData, num_sequences: int) -> DataPosition:
    return replace(found.position, num_sequences=num_sequences)


def test_position_of_a_checkpoint_without_shuffled_or_weighted_data_stays_valid(place: Path) -> None:
    (place / "more.txt").unlink()
    how = '[{"pack": true, "seed": 0, "text_field": "text"}, 8, "blake3:one", [["text.txt", 13], ["text.txt", 13]]]'
    left = DataPosition(num_sequences=320, digest="blake3:" + blake3(how.encode()).hexdigest())
    assert find("--data", "text.txt", "--data", str(place), left=left).position == left


def test_position_of_a_checkpoint_with_weighted_data_stays_valid() -> None:
    how = '[{"pack": true, "seed": 0, "text_field": "text", "weights": [1.0, 3.0]}, 8, "blake3:one", '
    how += '[[["text.txt", 13]], [["more.txt", 13]]]]'
    left = DataPosition(num_sequences=320, digest="blake3:" + blake3(how.encode()).hexdigest())
    weighted = ("--data", "text.txt", "--data-weight", "1", "--data", "more.txt", "--data-weight", "3")
    assert find(*weighted, left=left).position == left


def framed(folder: Path, *args: str, left: DataPosition | None = None) -> FoundData:
    return find_data(options("--data", "text.txt", *args), left, "blake3:one", folder)


@pytest.mark.parametrize("flag", ["--no-add-bos-token", "--no-add-eos-token"])
def test_position_of_documents_framed_otherwise_by_a_flag_is_refused(flag: str, place: Path) -> None:
    folder = write_tokenizer(place / "tokenizer")
    left = used(framed(folder, flag), 48)
    assert framed(folder, flag, left=left).position == left
    with pytest.raises(InputError) as error:
        framed(folder, left=left)
    assert error.value.code == "resume.other-data"


def test_cursor_of_other_sources_is_refused(place: Path) -> None:
    asked = 2 * ("--data", str(place), "--data-weight", "1")
    positions = 3 * (SourcePosition(epoch=0, item=0, offset=0),)
    left = replace(find(*asked).position, cursor=DataCursor(num_documents=0, num_tokens=0, sources=positions))
    with pytest.raises(InputError) as error:
        find(*asked, left=left)
    assert (error.value.where, error.value.code) == ("training.data.cursor.sources", "resume.other-data")


@pytest.mark.parametrize(
    "args",
    [
        ("--seq-len", "9"),
        ("--no-packing",),
        ("--data", "more.txt"),
        ("--shuffle",),
        ("--data-weight", "1"),
        ("--seed", "1"),
        ("--loss", "preference"),
        ("--label-smoothing", "0.1"),
        ("--z-loss", "0.1"),
        ("--token-weights", "weight"),
        ("--data-class", "stream"),
        (),
    ],
)
def test_data_that_is_numbered_otherwise_is_refused_or_begins_when_that_is_asked_for(args: tuple[str, ...]) -> None:
    left = used(find("--data", "text.txt"), 48)
    tokenizer = "blake3:one" if args else "blake3:another"
    with pytest.raises(InputError) as error:
        find("--data", "text.txt", *args, left=left, tokenizer=tokenizer)
    assert (error.value.where, error.value.code) == ("--data", "resume.other-data")
    assert all(flag.replace("--no-", "--") in error.value.problem for flag in args[:1] if flag != "--data")
    begun = find("--data", "text.txt", *args, "--resume", "auto", "--restart-data", left=left, tokenizer=tokenizer)
    assert (begun.position.num_sequences, begun.position.cursor) == (0, None)
    assert begun.position.digest != left.digest
    assert len(begun.notes) == 1


def test_job_that_began_other_data_goes_on_in_it_whenever_it_is_started_again() -> None:
    asked = ("--data", "more.txt", "--resume", "auto", "--restart-data")
    assert find(*asked).notes == ()  # nothing is gone on from
    first = find(*asked, left=used(find("--data", "text.txt"), 48))
    assert first.position.num_sequences == 0
    for num_sequences in (8, 16):
        again = find(*asked, left=used(first, num_sequences))
        assert again.position == used(first, num_sequences)
        assert len(again.notes) == 1
    anew = find(*asked, "--seed", "1", left=used(first, 16))
    assert anew.position.num_sequences == 0
    assert find(*asked, "--seed", "1", left=used(anew, 8)).position == used(anew, 8)


def test_rank_that_finds_other_files_than_rank_0_is_refused_by_the_source(place: Path) -> None:
    asked = ("--data", "text.txt", "--data", "more.txt")
    on_rank_0 = find(*asked)
    check_alike(options(*asked).data, find(*asked), on_rank_0)
    (place / "more.txt").write_text("one two")
    with pytest.raises(InputError) as error:
        check_alike(options(*asked).data, find(*asked), on_rank_0)
    assert (error.value.where, error.value.code) == ("--data more.txt", "data.differs-between-ranks")


def test_rank_that_cuts_the_same_files_otherwise_than_rank_0_is_refused() -> None:
    asked = ("--data", "text.txt")
    with pytest.raises(InputError) as error:
        check_alike(options(*asked).data, find(*asked, tokenizer="blake3:another"), find(*asked))
    assert (error.value.where, error.value.code) == ("--data", "data.differs-between-ranks")
