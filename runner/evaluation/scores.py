"""What an evaluation records of tokens on a rank, and `--out scores.parquet`: a record for each document."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import nn

from manifests.errors import UsageError, system_errors
from runner.data.rows import IGNORED, RowForm
from runner.data.sequences import Batch
from runner.evaluation.options import EvalOptions
from runner.pipeline.chunk import StageChunk, part_of
from runner.pipeline.losses import Loss

# Of consecutive rows, by the name of what is recorded: (B, L) or (B, L, n), on the CPU.
Recorded: TypeAlias = dict[str, torch.Tensor]


class TokenLosses(Loss):
    """Cross-entropy of each token, recorded for all microbatches since they were last taken.

    # Note [Losses to the last digit]
    The same microbatches give the same bits on every number of stages and replicas; what differs is who has them, and
    in which order. So the losses of a microbatch are summed exactly, and so are these sums: the printed loss depends on
    no layout.
    """

    def __init__(self, top_k: int = 0, *, keeps_rows: bool = False) -> None:
        super().__init__(lambda *_: (torch.zeros(()), 0), RowForm(), is_own=True)  # `__call__` is its own
        self._top_k, self._keeps_rows = top_k, keeps_rows
        self._rows: dict[str, list[torch.Tensor]] = {}
        self.sums = list[tuple[float, int]]()  # of each microbatch, and its number of labels

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, *, num_tokens: int, **fields: torch.Tensor
    ) -> torch.Tensor:
        losses = _cross_entropy(logits, labels)
        counted = losses[labels != IGNORED]
        self.sums.append((math.fsum(counted.tolist()), len(counted)))
        if self._keeps_rows:
            self.record("losses", losses)
        if self._top_k:
            largest = logits.float().topk(self._top_k)
            self.record("top_ids", largest.indices.int())
            self.record("top_logits", largest.values)
        return losses.sum() / num_tokens

    def watch(self, chunks: Sequence[StageChunk], module: str) -> None:
        """Record what a module of the model returns, if one of these chunks has it."""
        family = chunks[0].family
        if module in getattr(getattr(family, "mtp", None), "modules", ()):
            problem = "is an MTP layer, which runs in training alone"
            raise UsageError(f"--hidden-states {module}", problem, "name another layer", code="options.scores")
        if module not in family.modules:
            problem = f"{family.architecture} has no such module"
            hint = f"name one of those that stages have, such as {family.modules[len(family.modules) // 2]}"
            raise UsageError(f"--hidden-states {module}", problem, hint, code="options.scores")

        def record(_: nn.Module, __: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if not isinstance(states, torch.Tensor) or states.dim() != 3:
                problem = "does not return hidden states (B, L, D)"
                raise UsageError(f"--hidden-states {module}", problem, "name a layer", code="options.scores")
            self.record("hidden_states", states.float())

        for chunk in chunks:
            if module in chunk.module_names:
                part_of(chunk, module).register_forward_hook(record)

    def record(self, name: str, rows: torch.Tensor) -> None:
        self._rows.setdefault(name, []).append(rows.detach().to("cpu", copy=True))

    def take(self) -> tuple[list[tuple[float, int]], Recorded]:
        """Return the sums of microbatches, and the rows, in their order, and forget them."""
        taken = self.sums, {name: torch.cat(parts) for name, parts in self._rows.items()}
        self.sums, self._rows = [], {}
        return taken


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token (B, L), 0 where its label is ignored."""
    flat = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(flat, labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(labels.shape)


_MOST_ROWS = 256  # documents of a row group
_writing = partial(system_errors, problem="cannot be written", code="output.unwritable")


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
            ends = [begin - 1 for begin in sample.begins]
            for number, first, end in zip(sample.documents, [0, *ends], [*ends, sample.num_labels], strict=True):
                if first < end:
                    self._extend(number, {name: those[first:end] for name, those in values.items()})

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
    with _writing(path):
        temporary = TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True)
    with temporary as folder:
        with _writing(path):
            scores = Scores(Path(folder) / path.name, path, options)
        yield scores
        with _writing(path):
            scores.close()
            os.replace(Path(folder) / path.name, path)
