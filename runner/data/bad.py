"""Invalid documents: an error, or skipped and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from manifests.errors import DataError

T = TypeVar("T")
logger = logging.getLogger("runner")


class BadDocumentError(DataError):
    """A document that is not text. Its file can be read, and later documents may be valid."""


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
