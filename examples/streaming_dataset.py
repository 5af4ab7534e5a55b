"""A dataset of your own: lines of a stream, tokenized as they come, of which each rank yields its rows.

In the pyproject.toml of the package that has this module:

    [project.entry-points."runner.data"]
    lines = "streaming_dataset:Lines"

    runner launch ./packed -- --data-class lines --data https://example.org/lines.txt

Its state is how many lines were read. Checkpoints store it, and a run that resumes, on any number of ranks, gets it.
"""

import contextlib
import urllib.request
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tokenizers import Tokenizer

import runner


class Lines:
    def __init__(self, request: runner.DataRequest) -> None:
        self.request = request
        self.tokenizer = Tokenizer.from_file(str(request.folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def read(self, state: int | None) -> Iterator[tuple[list[dict[str, Any]], int]]:
        """Yield this rank's rows for each step, and how many lines all ranks have read after it."""
        num_rows, rank = self.request.num_rows, self.request.rank
        place = state or 0
        lines = islice(self.lines(), place, None)
        while batch := list(islice(lines, num_rows * self.request.num_ranks)):
            place += len(batch)
            rows = [self.tokenizer.encode(line).ids for line in batch[rank * num_rows : (rank + 1) * num_rows]]
            yield [{"input_ids": ids[: self.request.seq_len]} for ids in rows], place

    def lines(self) -> Iterator[str]:
        """Yield the lines of all sources, over and over."""
        while True:
            for source in self.request.sources:
                with contextlib.closing(urllib.request.urlopen(source)) as stream:
                    yield from (line.decode() for line in stream if not line.isspace())
