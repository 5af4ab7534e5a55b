"""What is fuzzed: a check that raises where a promise is broken, inputs to begin with, and what the input is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tests.fuzz import archive, documents, header, job, manifest, record, runlog, tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder under fuzzing; `kind` chooses how inputs are mutated."""

    check: Callable[[bytes], None]
    seeds: Callable[[], tuple[bytes, ...]]
    kind: Literal["json", "lines", "header", "bytes"]


TARGETS: Mapping[str, Target] = {
    "header": Target(header.check, header.seeds, "header"),
    "manifest": Target(manifest.check, manifest.seeds, "json"),
    "record": Target(record.check, record.seeds, "json"),
    "archive": Target(archive.check, archive.seeds, "bytes"),
    "alike": Target(archive.check_alike, archive.alone, "bytes"),
    "pickle": Target(archive.check_pickle, archive.pickles, "bytes"),
    "metadata": Target(archive.check_metadata, archive.metadata, "bytes"),
    "text": Target(documents.check_text, documents.texts, "bytes"),
    "lines": Target(documents.check_lines, documents.lines, "lines"),
    "parquet": Target(documents.check_rows, documents.rows, "bytes"),
    "tokenizer": Target(tokenizer.check, tokenizer.seeds, "json"),
    "job": Target(job.check, job.seeds, "bytes"),
    "runlog": Target(runlog.check, runlog.seeds, "json"),
}
