"""Invalid documents: an error, or skipped and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from manifests.errors import DataError

MOST_NBYTES = 64 << 20  # of a document in JSON or a row: in memory it takes up to 4 times as much, twice for a moment

T = TypeVar("T")
logger = logging.getLogger("runner")


class BadDocumentError(DataError):
    """A document that is not text. Its file can be read, and later documents may be valid."""


def too_long(where: str, nbytes: int) -> BadDocumentError:
    problem = f"has {nbytes} bytes, expected at most {MOST_NBYTES} in one document of this format"
    hint = "split the document, or write it as a .txt file of its own, which may have any length"
    return BadDocumentError(where, problem, hint, code="data.too-long")


@dataclass(kw_only=True, slots=True)
class Skipped:
    """The number of documents that a reader has skipped, and a callback for each."""

    count: int = 0
    on_skip: Callable[[BadDocumentError], None] | None = None

    def good(self, pieces: Iterator[T]) -> Iterator[T]:
        """Yield a document's pieces up to the first that is not text; the rest is skipped, and counted once."""
        try:
            yield from pieces
        except BadDocumentError as error:
            self.count += 1
            if self.on_skip is not None:
                self.on_skip(error)


def log_skipped(error: BadDocumentError) -> None:
    """Log a document that is skipped, and why."""
    logger.warning("note: skipped %s: %s", error.where, error.problem)
