"""`--out scores.parquet`: the loss of each token, a record for each document."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from manifests.errors import refused_by_system
from runner.data.rows import IGNORED
from runner.data.sequences import Batch
from runner.evaluation.options import EvalOptions

if TYPE_CHECKING:
    import torch

_MOST_ROWS = 256  # documents of a row group


class Scores:
    """Documents with the losses of their tokens, in the order of the data, as they become complete.

    Packed documents continue in the next row, which comes next; of others, a row is a document.
    """

    def __init__(self, path: Path, target: Path, options: EvalOptions) -> None:
        import pyarrow
        from pyarrow import parquet

        self._pyarrow, self._target = pyarrow, target  # which errors are about
        columns = {
            "document": pyarrow.int64(), "tokens": pyarrow.list_(pyarrow.int32()),
            "labels": pyarrow.list_(pyarrow.int32()), "losses": pyarrow.list_(pyarrow.float32()),
            "loss": pyarrow.float64(), "num_tokens": pyarrow.int64(),
        }  # fmt: skip
        if options.top_k:
            columns["top_ids"] = pyarrow.list_(pyarrow.list_(pyarrow.int32()))
            columns["top_logits"] = pyarrow.list_(pyarrow.list_(pyarrow.float32()))
        if options.hidden_states is not None:
            columns["hidden_states"] = pyarrow.list_(pyarrow.list_(pyarrow.float32()))
        self._schema = pyarrow.schema(list(columns.items()))
        self._writer = parquet.ParquetWriter(path, self._schema)
        self._documents: list[dict[str, Any]] = []

    def add(self, batch: Batch, recorded: Mapping[str, torch.Tensor]) -> None:
        """Add the rows of a whole batch, with what was recorded of them."""
        tensors = {"tokens": batch.tokens, "labels": batch.labels, **recorded}
        for row, sample in enumerate(batch.samples):
            values = {name: tensor[row, : sample.num_labels].tolist() for name, tensor in tensors.items()}
            values["losses"] = [
                None if label == IGNORED else loss
                for loss, label in zip(values["losses"], values["labels"], strict=True)
            ]
            ends = [begin - 1 for begin in sample.begins] if sample.is_packed else []
            for piece, (first, end) in enumerate(zip([0, *ends], [*ends, sample.num_labels], strict=True)):
                if first < end:
                    self._extend(sample.document + piece, {name: those[first:end] for name, those in values.items()})

    def close(self) -> None:
        self._write()
        self._writer.close()

    def _extend(self, document: int, values: Mapping[str, list[Any]]) -> None:
        if self._documents and self._documents[-1]["document"] == document:
            for name, those in values.items():
                self._documents[-1][name] += those
            return
        if len(self._documents) == _MOST_ROWS:
            self._write()
        self._documents.append({"document": document, **values})

    def _write(self) -> None:
        for document in self._documents:
            losses = [loss for loss in document["losses"] if loss is not None]
            document |= {"loss": math.fsum(losses), "num_tokens": len(losses)}
        with _writing(self._target):
            self._writer.write_table(self._pyarrow.Table.from_pylist(self._documents, self._schema))
        self._documents = []


@contextmanager
def writing_scores(path: Path, options: EvalOptions) -> Iterator[Scores]:
    """Write scores beside `path`, which gets them once the block has ended without an error."""
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        with _writing(path):
            scores = Scores(Path(folder) / path.name, path, options)
        yield scores
        with _writing(path):
            scores.close()
            os.replace(Path(folder) / path.name, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused_by_system(str(path), error, "cannot be written", code="output.unwritable") from error
