"""Data of a package's own: a class that yields rows of token ids from a state on."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from manifests.digest import digest_pieces
from manifests.errors import DataError, UserError
from runner.config.entry_points import load_entry_point
from runner.config.schema import DATASETS, BatchOptions, DataOptions
from runner.data.packing import RowSample
from runner.data.rows import BadDocumentError, RowForm, parse_row
from runner.data.sequences import Batch, Rows, build_batch
from runner.data.shared import Exchange, StoppedReading
from runner.distributed.fail_together import exhausted, unreachable


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRequest:
    """What a dataset is made with: an entry point of `runner.data` takes one."""

    sources: tuple[str, ...]  # what --data says
    seed: int
    folder: Path  # of the tokenizer and config.json
    vocab_size: int
    seq_len: int
    rank: int  # among the ranks with rows of their own, which other ranks may share with it
    num_ranks: int
    num_rows: int  # of each batch, on this rank


class Dataset(Protocol):
    """Rows of token ids as `--tokenized` reads them: mappings with `input_ids`, and `labels` or a `loss_mask`."""

    def read(self, state: Any) -> Iterator[tuple[Sequence[Mapping[str, Any]], Any]]:
        """Yield `request.num_rows` rows for each step, and the state after it, from a state on; None: the beginning.

        A state is JSON, not None, and the same on all ranks. This must not end before --steps: the run then fails, and
        the steps since its last checkpoint are lost.
        """


class SharedCounts:
    """What the ranks that read a dataset tell each other of each batch; one that stops gathers None, which ends all."""

    def __init__(self, exchange: Exchange | None) -> None:
        self._exchange, self._is_stopped = exchange, threading.Event()

    def gather(self, rank: int, counts: tuple[int, ...], digest: str, state: str) -> tuple[int, ...]:
        """Return the sums of counts over all ranks; those with the same rows, of one digest, count once."""
        if self._exchange is None:
            return counts
        shares = self._exchange.gather(None if self._is_stopped.is_set() else (rank, counts, digest, state))
        counted = [share for share in shares if share is not None]
        if len(counted) < len(shares):
            raise StoppedReading
        by_rank = {rank: counts_there for rank, counts_there, *_ in counted}
        if len({state for *_, state in counted}) > 1 or len({share[:3] for share in counted}) > len(by_rank):
            problem = "ranks have other states, or other rows where they share them, after the same batch"
            hint = "a state depends on no rank, and ranks with one request.rank read the same rows"
            raise DataError("--data-class", problem, hint, code="data.differs-between-ranks")
        return tuple(map(sum, zip(*by_rank.values(), strict=True)))

    def stop(self) -> None:
        """Ask to stop reading, from any thread: the next batch is the last."""
        self._is_stopped.set()

    def leave(self) -> None:
        """Take part in the last exchange."""
        if self._exchange is not None:
            self._exchange.gather(None)


def read_dataset(
    data: DataOptions, batch: BatchOptions, form: RowForm | None, rows: Rows, state: str | None, counts: SharedCounts,
    *, folder: Path, vocab_size: int,
) -> Iterator[Batch]:  # fmt: skip
    """Yield this rank's rows of each batch from a state on, as JSON; every batch has the state after it."""
    assert data.dataset is not None
    request = DataRequest(
        sources=data.sources, seed=data.seed, folder=folder, vocab_size=vocab_size, seq_len=batch.seq_len,
        rank=rows.number, num_ranks=rows.count, num_rows=batch.global_batch // rows.count,
    )  # fmt: skip
    where = f"--data-class {data.dataset}"
    row = replace(form or RowForm(), seq_len=batch.seq_len, vocab_size=vocab_size, is_masked=data.document_mask)
    for records, after in _read_own(data.dataset, request, state, where):
        try:
            text = json.dumps(after)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(where, f"its state is not JSON: {error}", code="data.dataset") from error
        if after is None or json.loads(text) != after:
            hint = "use lists in place of tuples, and text as keys"
            raise DataError(where, "its state is None, or another one after JSON", hint, code="data.dataset")
        if not all(isinstance(record, Mapping) for record in records):
            raise DataError(where, "expected rows that are mappings", code="data.dataset")
        if len(records) != request.num_rows:
            problem = f"expected {request.num_rows} rows in a batch, found {len(records)}"
            raise DataError(where, problem, "yield request.num_rows of them", code="data.dataset")
        try:
            parsed = [parse_row(record, row, lambda: where) for record in records]
        except BadDocumentError as error:
            raise DataError(error.where, error.problem, error.hint, code=error.code) from error
        samples = [RowSample(ids=parsed_row.encode(), is_masked=row.is_masked) for parsed_row in parsed]
        local = build_batch(samples, batch.seq_len, 0, form=row)
        counts_here = sum(sample.num_tokens for sample in samples), sum(sample.num_documents for sample in samples)
        digest = digest_pieces(sample.ids.tobytes() for sample in samples)  # of labels, positions and fields, too
        num_tokens, num_documents = counts.gather(rows.number, counts_here, digest, json.dumps(after, sort_keys=True))
        yield replace(local, num_tokens=max(1, num_tokens), num_documents=num_documents, state=text)
    raise DataError(where, "has ended before --steps", "start over in it, or lower --steps", code="data.dataset")


def _read_own(name: str, request: DataRequest, state: str | None, where: str) -> Iterator[tuple[Sequence[Any], Any]]:
    """Yield what a dataset yields. What its code raises is an error of the data, which ends no save."""
    dataset_class = load_entry_point(DATASETS, name, "--data-class")
    try:
        dataset: Dataset = dataset_class(request)
        for rows, after in dataset.read(None if state is None else json.loads(state)):
            yield [dict(row) if isinstance(row, Mapping) else row for row in rows], after
    except UserError:
        raise
    except Exception as error:
        if (refusal := exhausted(error) or unreachable(error)) is not None:
            raise refusal from error
        reason = f"fails with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        problem, hint = f"{reason}\n{traceback.format_exc().rstrip()}", "fix it as docs/own-data.md describes"
        raise DataError(where, problem, hint, code="data.dataset") from error
