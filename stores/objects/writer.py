"""The upload of one object of an output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from manifests.errors import InputError
from stores.objects.client import Upload

logger = logging.getLogger(__name__)


class ObjectWriter:
    """One object, written sequentially; it exists once it is finished.

    `check` raises if the prefix is no longer locked by this process. `done` is called once the object exists.
    """

    def __init__(
        self,
        where: str,
        upload: Upload,
        nbytes: int,
        check: Callable[[], None],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._where = where
        self._upload = upload
        self._nbytes = nbytes
        self._check, self._done = check, done
        self._position = 0
        self.is_open = True

    @property
    def is_aligned(self) -> bool:
        return False

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`, the end of the previous piece.

        Memory may be used for other bytes afterwards, unless it is read-only: then it is sent without a copy.
        """
        assert position == self._position, f"{self._where}: {position} after {self._position}"
        piece = buffer[begin:end]
        self._upload.write(piece if piece.readonly else bytes(piece))
        self._position += end - begin

    def write_all(self, blocks: Iterable[memoryview | bytes]) -> None:
        """Write the whole object from these blocks, and complete it; if that fails, the upload is abandoned."""
        try:
            for block in blocks:
                self.write(memoryview(block), 0, len(block), self._position)
            self.finish()
        finally:
            self.close()

    def finish(self) -> None:
        """Complete the upload, so that the object exists."""
        assert self._position == self._nbytes, f"{self._where}: {self._position} of {self._nbytes} bytes"
        self._check()
        self.is_open = False
        self._upload.finish()
        self._done()

    def close(self) -> None:
        """Abandon the upload unless it is finished; may be called twice."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            self._upload.abandon()
        except InputError as error:
            logger.warning(
                "%s: an unfinished upload, which takes space and is not listed, may be left: %s",
                self._where,
                error.problem,
            )
