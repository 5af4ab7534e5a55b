"""Verification of whole files against the SHA-256 that the hub lists, hashed from the output while it is written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from manifests.errors import InputError
from reshard.copy.runs import Run
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.checksums import stored_file
from stores.base import InputFile, Listed, Range, hub_mismatch, merge_ranges, read_in_blocks
from stores.direct_io import OutputFile
from stores.local import LocalFile
from stores.workers import threads_for_ranks

if TYPE_CHECKING:
    import hashlib


@dataclass(frozen=True, kw_only=True, slots=True)
class HubReport:
    """The names of the weight files that match the hub's SHA-256, and of those that were not verified."""

    verified: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


class HubCheck:
    """Compares every weight file of a hub repository with the SHA-256 that the hub lists.

    What is written unchanged below `folder` is read from there, which verifies the bytes on disk, also those of an
    interrupted run. The rest of a file is read from the hub if `fetch` allows it; otherwise it is not verified.
    """

    def __init__(
        self, checkpoint: Checkpoint, shards: Sequence[OutputShard], folder: Path | None, *, fetch: bool
    ) -> None:
        files = {} if checkpoint.originals is None else checkpoint.originals.files
        listed = {name: file for name, file in files.items() if isinstance(file, Listed) and len(file.listed) == 64}
        written = _written(shards, folder) if folder is not None and listed else {}
        heads = dict.fromkeys(listed, b"")  # of other files than safetensors, pieces have all bytes
        for shard in checkpoint.record.shards:
            if shard.name in listed:
                heads[shard.name] = len(shard.header_text).to_bytes(8, "little") + shard.header_text
        plans = {name: tuple(_pieces(file, len(heads[name]), written.get(file, ()))) for name, file in listed.items()}
        self._ready: dict[InputFile, _Verified] = {
            file: _Verified(name, file, heads[name], plans[name])
            for name, file in listed.items()
            if fetch or all(piece.file != file for piece in plans[name])
        }
        self._unverified = tuple(name for name, file in listed.items() if file not in self._ready)
        self._done, self._lock = dict[Path, tuple[Range, ...]](), threading.Lock()
        self._pool = ThreadPoolExecutor(threads_for_ranks(), thread_name_prefix="hub-check")

    def written(self, run: Run) -> None:
        """Continue hashing, in other threads, the files whose bytes a run has put on disk."""
        if not self._ready or not isinstance(run.output, OutputFile):
            return
        path, end = run.output.path, run.position + sum(tensor.nbytes for tensor in run.tensors)
        with self._lock:
            self._done[path] = merge_ranges((*self._done.get(path, ()), (run.position, end)))
        for file in {stored_file(tensor.file) for tensor in run.tensors} & self._ready.keys():
            self._pool.submit(self._ready[file].follow, self._written_until)

    def finish(self) -> HubReport:
        """Hash the rest, and compare."""
        for done in [self._pool.submit(file.verify) for file in self._ready.values()]:
            done.result()
        return HubReport(verified=tuple(file.name for file in self._ready.values()), unverified=self._unverified)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _written_until(self, piece: _Piece) -> int:
        """Return the end of the bytes that are written of a piece, from its first on."""
        with self._lock:
            done = self._done.get(piece.file.path, ()) if isinstance(piece.file, LocalFile) else ()
        ends = (end for begin, end in done if begin <= piece.position < end)
        return min(piece.end, next(ends, piece.position))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a hub file, from `begin` there, and where to read them."""

    begin: int
    nbytes: int
    file: InputFile
    position: int

    @property
    def end(self) -> int:
        return self.position + self.nbytes

    def after(self, position: int) -> _Piece:
        """Return the rest, from this position on."""
        gone = position - self.position
        return replace(self, begin=self.begin + gone, nbytes=self.nbytes - gone, position=position)


class _Verified:
    """A file of the hub, and what is hashed of it so far."""

    def __init__(self, name: str, file: Listed, head: bytes, pieces: Sequence[_Piece]) -> None:
        self.name, self._file, self._head, self._pieces = name, file, head, pieces
        self._exclusive, self._has_more = threading.Lock(), False
        self._begin()

    def follow(self, until: Callable[[_Piece], int]) -> None:
        """Hash the next pieces, as far as they are written, unless another thread does."""
        self._has_more = True
        while self._has_more and self._exclusive.acquire(blocking=False):
            try:
                self._has_more = False
                self._hash(until)
            except InputError:  # raised again by `verify`, if it persists
                self._begin()
            finally:
                self._exclusive.release()

    def _hash(self, until: Callable[[_Piece], int]) -> None:
        while self._remaining and (end := until(self._remaining[0])) > self._remaining[0].position:
            piece = self._remaining.popleft()
            for block in read_in_blocks(piece.file, ((piece.position, end),)):
                self._hasher.update(block)
            if end < piece.end:
                self._remaining.appendleft(piece.after(end))

    def verify(self) -> None:
        """Hash the rest and compare; a file that differs is hashed again, now that all of it is at rest."""
        with self._exclusive:
            if self._finished() != self._file.listed:
                self._begin()
            digest = self._finished()
        if digest != self._file.listed:
            raise hub_mismatch(self._file, f"expected SHA-256 {self._file.listed} (the hub's listing), found {digest}")

    def _begin(self) -> None:
        import hashlib  # OpenSSL's

        self._hasher: hashlib._Hash = hashlib.sha256(self._head)
        self._remaining = deque(self._pieces)

    def _finished(self) -> str:
        self._hash(lambda piece: piece.end)
        return self._hasher.hexdigest()


def _written(shards: Sequence[OutputShard], folder: Path) -> dict[InputFile, list[_Piece]]:
    """Return where the bytes of each source file are written; neighbors in both files are one piece."""
    pieces_of: dict[InputFile, list[_Piece]] = {}
    for shard in shards:
        file = LocalFile(folder / shard.path, may_change=True)
        for origin, position in shard.placed:
            if not origin.nbytes:
                continue
            pieces = pieces_of.setdefault(stored_file(origin.file), [])
            last = pieces[-1] if pieces else None
            if last and (last.file, last.end, last.begin + last.nbytes) == (file, position, origin.begin):
                pieces[-1] = replace(last, nbytes=last.nbytes + origin.nbytes)
            else:
                pieces.append(_Piece(origin.begin, origin.nbytes, file, position))
    return pieces_of


def _pieces(file: InputFile, head_nbytes: int, written: Iterable[_Piece]) -> Iterator[_Piece]:
    """Yield the pieces that make up a file's data, in order; what is not written is read from the file itself."""
    position = head_nbytes
    for piece in sorted(written, key=lambda piece: piece.begin):
        if piece.begin > position:
            yield _Piece(position, piece.begin - position, file, position)
        elif piece.begin < position:  # a tied weight is written twice
            piece = piece.after(min(piece.end, piece.position + position - piece.begin))
        if piece.nbytes:
            yield piece
            position = piece.begin + piece.nbytes
    if position < file.nbytes:
        yield _Piece(position, file.nbytes - position, file, position)
