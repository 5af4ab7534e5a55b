"""Ranks that read together read the batches of one rank, and stop and fail together."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from manifests.errors import UserError
from runner.config.schema import BatchOptions, DataOptions
from runner.data import files
from runner.data.read_ahead import ReadAhead
from runner.data.rows import Skipped
from runner.data.sequences import Batch, Rows, read_batches
from runner.data.shared import SharedReading
from tests.fast.runner.data.golden import GLOBAL_BATCH, NUM_BATCHES, Case, cases, digests, write_sources
from tests.fast.runner.data.words import VOCAB_SIZE, write_documents, write_tokenizer

GOLDEN: dict[str, list[str]] = json.loads(Path(__file__).with_name("golden_batches.json").read_text())
FAST = (
    "weighted, shuffled, padded",
    "weighted, in order, packed",
    "skipped, shuffled, packed",
    "long, shuffled, packed",
)
T = TypeVar("T")
CPU = torch.device("cpu")


class Threads:
    """An exchange between threads of this process, each with a disk of its own for what is in a folder `node-0`."""

    def __init__(self, rank: int, size: int, values: list[object], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.label = rank, size, f"rank {rank}"
        self._values, self._barrier = values, barrier

    def gather(self, value: T) -> Sequence[T]:
        self._values[self.rank] = value
        self._barrier.wait(60)
        node = b"node-%d" % self.rank
        values = [pickle.loads(pickle.dumps(each).replace(b"node-0", node)) for each in self._values]
        self._barrier.wait(60)
        return values  # type: ignore[return-value]

    def collect(self, value: T) -> Sequence[T]:
        values = self.gather(value)
        return () if self.rank else values

    def scatter(self, values: Sequence[T]) -> T:
        received: T = self.gather(values)[0][self.rank]
        return received


def on_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """Run `work` in a thread for each rank."""
    values, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Threads(rank, size, values, barrier)), range(size)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("golden")
    write_sources(place)
    return place


def read(case: Case, place: Path, exchange: Threads, **how: object) -> Iterator[Batch]:
    """Read this rank's rows: two ranks, the first and the last stage, of each of `size // 2` replicas."""
    return read_batches(
        case.options(place), case.batch, folder=place / "tokenizer", vocab_size=VOCAB_SIZE,
        rows=Rows(number=exchange.rank // 2, count=exchange.size // 2), shared=SharedReading(exchange), **how,
    )  # type: ignore[arg-type]  # fmt: skip


def joined(replicas: Sequence[Sequence[Batch]]) -> Iterator[Batch]:
    for parts in zip(*replicas, strict=True):
        tokens, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "labels"))
        yield replace(parts[0], tokens=tokens, labels=labels)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in GOLDEN]
)
def test_rows_of_all_ranks_are_the_batches_of_before(name: str, place: Path) -> None:
    case, num_ranks = cases()[name], 8
    read_by = on_ranks(
        num_ranks,
        lambda exchange: list(islice(read(case, place, exchange, start=case.start, skipped=Skipped()), NUM_BATCHES)),
    )
    assert all(len(batch.tokens) == GLOBAL_BATCH // 4 for batches in read_by for batch in batches)
    for last in (0, 1):
        assert digests(joined(read_by[last::2])) == GOLDEN[name]
    assert len({batches[-1].num_tokens for batches in read_by}) == 1
    if (cursor := read_by[0][2].cursor) is not None:
        resumed = on_ranks(
            2,
            lambda exchange: list(
                islice(read(case, place, exchange, cursor=cursor, skipped=Skipped(count=cursor.num_skipped)), 5)
            ),
        )
        assert digests(resumed[1]) == GOLDEN[name][3:]


def lines(place: Path, num_documents: int = 2000) -> Path:
    file = place / "many.jsonl"
    write_documents(file, [[(number + place) % 8 for place in range(40)] for number in range(num_documents)])
    return file


def test_each_rank_tokenizes_its_part_and_parses_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = write_tokenizer(tmp_path / "tokenizer"), lines(tmp_path)
    parsed, loads = dict[int, int](), json.loads

    def count(text: str, **how: object) -> object:
        parsed[threading.get_ident()] = parsed.get(threading.get_ident(), 0) + 1
        return loads(text, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(json, "loads", count)
    data, batch = DataOptions(sources=(str(file),)), BatchOptions(global_batch=8, microbatch=1, seq_len=42)

    def run(exchange: Threads) -> int:
        batches = read_batches(
            data, batch, folder=folder, vocab_size=VOCAB_SIZE, shared=SharedReading(exchange),
            rows=Rows(number=exchange.rank, count=exchange.size),
        )  # fmt: skip
        begun = parsed.get(threading.get_ident(), 0)
        assert sum(len(each.tokens) for each in islice(batches, 200)) == 2 * 200
        return parsed[threading.get_ident()] - begun

    first, *others = on_ranks(4, run)
    assert 1600 <= first + sum(others) < 2400  # documents are used; a round is whole
    assert 0.4 * min(others) < first < min(others)  # it reads and packs besides
    assert max(others) - min(others) < 20


@pytest.mark.parametrize("kind", ["a document", "a file"])
def test_what_cannot_be_read_ends_all_ranks_at_the_same_batch_and_one_reports_it(kind: str, tmp_path: Path) -> None:
    folder, file = write_tokenizer(tmp_path / "tokenizer"), lines(tmp_path)
    written = file.read_text().splitlines()[:60]
    if kind == "a document":
        written[40] = "{"
        write_documents(tmp_path / "b.jsonl", [[1, 2, 3]] * 50)
    else:
        (tmp_path / "b.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.jsonl").write_text("\n".join(written))
    batch = BatchOptions(global_batch=4, microbatch=1, seq_len=42)
    sources = tuple(str(path) for path in sorted(tmp_path.glob("[ab].*")))

    def run(exchange: Threads) -> tuple[int, UserError | None]:
        batches = read_batches(
            DataOptions(sources=sources), batch, folder=folder, vocab_size=VOCAB_SIZE,
            shared=SharedReading(exchange),
        )  # fmt: skip
        number = 0
        try:
            with ReadAhead(islice(batches, 30), CPU) as reader:
                while number < 30:
                    reader.take()
                    number += 1
        except UserError as error:
            return number, error
        return number, None

    (first, error), (second, other) = on_ranks(2, run)
    assert error is not None
    assert other is not None
    codes = {
        "a document": ("data.not-json", "a.jsonl:41"),
        "a file": ("data.not-parquet", "b.parquet"),
    }
    code, where = codes[kind]
    assert {error.code, other.code} == {code}
    assert error.where.endswith(where)
    assert other.where.startswith("rank 0: ")
    assert first == second
    if kind == "a document":
        assert first == 9  # the tenth batch ends with a token of document 41
    assert (error.is_elsewhere, other.is_elsewhere) == (False, True)


class FailingFile(io.FileIO):
    """A file on a disk that fails after the first pieces of a document."""

    def readinto(self, buffer: object, /) -> int | None:
        if self.tell() > 100_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.name)
        return super().readinto(buffer)  # type: ignore[arg-type]


def test_disk_that_fails_in_a_document_is_of_the_first_rank_whichever_tokenizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("w1 w2 w3\n" * 40_000)
    monkeypatch.setattr(files, "open", lambda file, *_, **__: io.BufferedReader(FailingFile(file)), raising=False)
    batch = BatchOptions(global_batch=4, microbatch=1, seq_len=42)

    def run(exchange: Threads) -> UserError:
        data, shared = DataOptions(sources=(str(tmp_path / "a.txt"),)), SharedReading(exchange)
        with pytest.raises(UserError) as caught:
            list(read_batches(data, batch, folder=folder, vocab_size=VOCAB_SIZE, shared=shared))
        return caught.value

    for error in on_ranks(3, run):
        assert (error.code, error.where) == ("data.unreadable", f"rank 0: {tmp_path / 'a.txt'}")


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", ["another file", "no file"])
def test_shuffled_lines_that_are_elsewhere_on_one_rank_end_all_with_its_name(
    kind: str, skips: bool, tmp_path: Path
) -> None:
    folder, batch = write_tokenizer(tmp_path / "tokenizer"), BatchOptions(global_batch=4, microbatch=1, seq_len=42)
    written = [json.dumps({"text": " ".join(["w1"] * (1 + number % 7))}) for number in range(60)]
    for rank, copy in enumerate((written, [*written[1:], written[0]])):
        (tmp_path / f"node-{rank}").mkdir()
        if rank == 0 or kind == "another file":
            (tmp_path / f"node-{rank}" / "a.jsonl").write_text("\n".join(copy) + "\n")
    data = DataOptions(sources=(str(tmp_path / "node-0"),), shuffle=True, skip_bad_documents=skips)

    def run(exchange: Threads) -> UserError:
        batches = read_batches(
            data, batch, folder=folder, vocab_size=VOCAB_SIZE, shared=SharedReading(exchange), skipped=Skipped()
        )
        with pytest.raises(UserError) as caught:
            list(islice(batches, 30))
        return caught.value

    error, other = on_ranks(2, run)
    code = "data.unreadable" if kind == "no file" else "data.differs-between-ranks"
    assert {error.code, other.code} == {code}
    assert error.where.startswith("rank 1: ")
    assert error.where.endswith("a.jsonl")
    assert (error.is_elsewhere, other.is_elsewhere) == (False, True)


@pytest.mark.parametrize("delay_s", [0, 0.05])
@pytest.mark.parametrize("num_taken", [0, 3])
def test_reader_stops_on_all_ranks_wherever_each_of_them_is(num_taken: int, delay_s: float, tmp_path: Path) -> None:
    folder, file = write_tokenizer(tmp_path / "tokenizer"), lines(tmp_path)
    batch = BatchOptions(global_batch=8, microbatch=1, seq_len=42)
    before, taken = threading.active_count(), threading.Barrier(3)

    def run(exchange: Threads) -> None:
        shared = SharedReading(exchange)
        batches = read_batches(
            DataOptions(sources=(str(file),)), batch, folder=folder, vocab_size=VOCAB_SIZE, shared=shared
        )
        with ReadAhead(batches, CPU, shared) as reader:
            for _ in range(num_taken):
                reader.take()
            taken.wait(60)  # as ranks do with the totals of a step
            time.sleep(exchange.rank * delay_s)

    on_ranks(3, run)
    assert threading.active_count() <= before


def test_rank_that_needs_more_than_the_others_is_told_that_one_has_stopped(tmp_path: Path) -> None:
    folder, file = write_tokenizer(tmp_path / "tokenizer"), lines(tmp_path)
    batch = BatchOptions(global_batch=8, microbatch=1, seq_len=42)

    def run(exchange: Threads) -> tuple[str, bool] | None:
        shared = SharedReading(exchange)
        batches = read_batches(
            DataOptions(sources=(str(file),)), batch, folder=folder, vocab_size=VOCAB_SIZE, shared=shared
        )
        try:
            with ReadAhead(batches, CPU, shared) as reader:
                for _ in range(10_000 if exchange.rank else 1):
                    reader.take()
        except UserError as error:
            return error.code, error.is_elsewhere
        return None

    assert on_ranks(2, run) == [None, ("rank.lost", True)]
