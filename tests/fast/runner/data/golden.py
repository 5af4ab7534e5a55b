"""Sources of every kind, ways to read them, and digests of the batches: `golden_batches.json` has those of old code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import pyarrow
import torch
from pyarrow import parquet

from runner.config.schema import BatchOptions, DataOptions, FramingOptions
from runner.data.sequences import Batch
from tests.fast.runner.data.words import write_documents, write_tokenizer

NUM_BATCHES, GLOBAL_BATCH = 8, 8
BAD_LINES = ('{"text": "w1 \\ud800"}', "{", '{"text": 3}', '{"text": ""}', "  ")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to read the sources."""

    data: dict[str, object]
    seq_len: int = 24
    start: int = 0

    def options(self, place: Path) -> DataOptions:
        names = self.data["sources"]
        assert isinstance(names, tuple)
        sources = tuple(name if name == "synthetic" else str(place / name) for name in names)
        return DataOptions(**{**self.data, "sources": sources})  # type: ignore[arg-type]

    @property
    def batch(self) -> BatchOptions:
        return BatchOptions(global_batch=GLOBAL_BATCH, microbatch=1, seq_len=self.seq_len)


@dataclass
class _Cases:
    cases: dict[str, Case] = field(default_factory=dict)

    def add(self, name: str, *sources: str, seq_len: int = 24, start: int = 0, **how: object) -> None:
        self.cases[name] = Case(data={"sources": sources, **how}, seq_len=seq_len, start=start)


def cases() -> dict[str, Case]:
    made, three = _Cases(), ("lines.jsonl", "rows.parquet", "text.txt")
    for shuffle in (False, True):
        for pack in (False, True):
            ways = {"shuffle": shuffle, "pack": pack, "seed": 5}
            name = f"{'shuffled' if shuffle else 'in order'}, {'packed' if pack else 'padded'}"
            for source in three:
                made.add(f"{source}, {name}", source, **ways)
            made.add(f"as one, {name}", *three, **ways)
            made.add(f"weighted, {name}", *three, weights=(3.0, 1.0, 0.5), **ways)
            made.add(
                f"skipped, {name}", "bad.jsonl", "bad.parquet", weights=(1.0, 2.0), skip_bad_documents=True, **ways
            )
            made.add(f"long, {name}", "long.jsonl", "long.txt", "lines.jsonl", seq_len=3000, **ways)
            made.add(f"started, {name}", *three, start=5, **ways)
    made.add("bare", "lines.jsonl", framing=FramingOptions(bos=False, eos=False))
    made.add("synthetic", "synthetic", seed=3, start=3)
    return made.cases


def write_sources(place: Path) -> Path:
    """Write the sources that `cases` name, and a tokenizer."""
    documents = [[number % 8, *((number * i * i) % 8 for i in range(3 + 5 * number % 17))] for number in range(60)]
    write_documents(place / "lines.jsonl", documents[:25])
    write_documents(place / "rows.parquet", documents[25:40], group=4)
    write_documents(place / "text.txt", documents[40:])
    lines = (place / "lines.jsonl").read_text().splitlines()
    pairs = zip(lines, BAD_LINES * 5, strict=True)
    (place / "bad.jsonl").write_text("\n".join(line for pair in pairs for line in pair))
    texts = [json.loads(line)["text"] for line in lines[:9]]
    rows = pyarrow.array([None, *(text.encode() for text in texts[:5]), b"\xff\xfe", b"", *map(str.encode, texts[5:])])
    column = pyarrow.StringArray.from_buffers(len(rows), rows.buffers()[1], rows.buffers()[2], rows.buffers()[0])
    parquet.write_table(pyarrow.table({"text": column}), place / "bad.parquet", row_group_size=4)
    words = [[(number * number + i * 3) % 8 for i in range(90)] for number in range(1200)]
    text = "\n".join(" ".join(f"w{word}" for word in line) for line in words)
    (place / "long.txt").write_text(text[: 140 << 10])
    long = {"text": text[: 300 << 10]}
    (place / "long.jsonl").write_text("\n".join((json.dumps(long), lines[0], json.dumps({"text": text[:70_000]}))))
    return write_tokenizer(place / "tokenizer")


def digests(batches: Iterable[Batch]) -> list[str]:
    """Return a digest for each of the first batches: its tokens and labels, the token count and the cursor."""
    return [_digest(batch) for batch in islice(batches, NUM_BATCHES)]


def _digest(batch: Batch) -> str:
    hasher = blake2b(digest_size=6)
    for tensor in (batch.tokens, batch.labels):
        assert tensor.dtype == torch.int64
        hasher.update(f"{tuple(tensor.shape)}".encode() + bytes(tensor.contiguous().numpy()))
    cursor = batch.cursor
    place = None if cursor is None else [
        cursor.num_documents, cursor.num_tokens, cursor.num_skipped,
        *([position.epoch, position.item, position.offset] for position in cursor.sources),
    ]  # fmt: skip
    hasher.update(json.dumps([batch.num_tokens, place]).encode())
    return hasher.hexdigest()
