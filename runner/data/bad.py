"""Documents that cannot be read as text: refused, or skipped and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from manifests.errors import DataError

__all__ = ["BadDocumentError", "Skipped"]

T = TypeVar("T")


class BadDocumentError(DataError):
    """A document that is no text: its file can be read, and those after it may be good."""


@dataclass(kw_only=True, slots=True)
class Skipped:
    """The documents that a reader has skipped so far, and who is told of each."""

    count: int = 0
    on_skip: Callable[[BadDocumentError], None] | None = None

    def good(self, pieces: Iterator[T]) -> Iterator[T]:
        """Take pieces of a document for as long as they are text; what follows is skipped, and counts as one."""
        try:
            yield from pieces
        except BadDocumentError as error:
            self.count += 1
            if self.on_skip is not None:
                self.on_skip(error)
