"""Teams: threads that copy one large tensor together, each its own blocks, which are hashed in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from manifests.digest import Hasher
from reshard.copy.direct_io import BLOCK_NBYTES, aligned_buffer
from reshard.copy.runs import ByteCounter, Chunk, Run, Sources, blocks_of, merged_reads
from reshard.tensors.checkpoint import check_digest
from reshard.tensors.checksums import stored_file
from reshard.tensors.slices import pieces_of
from stores.bundles import TensorAt
from stores.local import LocalFile

_LARGE_NBYTES = 256 << 20  # of a tensor for which one thread would keep the others waiting at the end
_SHARE_NBYTES = 64 << 20  # that is worth another thread
_POLL_S = 0.05


class Team:
    """Threads that copy a run of one tensor.

    A digest takes the bytes in order: whoever has read a block waits until the block before it is hashed. Reading and
    writing, which take longer, run side by side.
    """

    def __init__(self, run: Run) -> None:
        (self._tensor,) = run.tensors
        self._run, self._blocks = run, enumerate(blocks_of(run))
        self._num_left = -(-(run.position % BLOCK_NBYTES + self._tensor.nbytes) // BLOCK_NBYTES)
        self._hasher, self._num_hashed = Hasher(), 0
        self._changed = threading.Condition()
        self._is_led = False

    def lead(self) -> bool:
        """Return whether the calling thread is the first that asks."""
        with self._changed:
            was_led, self._is_led = self._is_led, True
            return not was_led

    def help(self, progress: ByteCounter, stop: threading.Event) -> bytes | None:
        """Copy blocks until none is left; return the tensor's digest if all of it is written now.

        Only one of the threads gets the digest.

        Raises:
            ShardError: the tensor's bytes do not match its digest.
        """
        buffer = aligned_buffer()
        with ExitStack() as stack:
            sources = Sources(self._run.tensors, {}, stack)
            while (claimed := self._claim()) is not None:
                number, (position, parts) = claimed
                for file, where, begin, end in merged_reads(parts):
                    sources[file].read_into(buffer[begin:end], where)
                if not self._await_turn(number, stop):
                    return None
                self._hash(buffer, parts)
                begin, end = parts[0].begin, parts[-1].end
                if self._run.output is not None:
                    self._run.output.write(buffer, begin, end, position)
                progress(end - begin)
                if self._is_last():
                    return self._hasher.digest()
        return None

    def _claim(self) -> tuple[int, tuple[int, list[Chunk]]] | None:
        with self._changed:
            return next(self._blocks, None)

    def _await_turn(self, number: int, stop: threading.Event) -> bool:
        with self._changed:
            while self._num_hashed != number:
                if stop.is_set():
                    return False
                self._changed.wait(_POLL_S)
        return not stop.is_set()

    def _hash(self, buffer: memoryview, parts: Sequence[Chunk]) -> None:
        """Hash a block whose turn it is; with the last one, verify the tensor."""
        self._hasher.update(buffer[parts[0].begin : parts[-1].end])
        if parts[-1].ended is not None and self._run.verifies and self._tensor.blake3 is not None:
            check_digest(self._tensor, self._hasher.hexdigest())
        with self._changed:
            self._num_hashed += 1
            self._changed.notify_all()

    def _is_last(self) -> bool:
        with self._changed:
            self._num_left -= 1
            return not self._num_left


@dataclass(frozen=True, slots=True)
class SharedRun(Run):
    """A run of one large tensor, which several threads take, and copy as a team."""

    team: Team = field(kw_only=True)


def with_teams(runs: Sequence[Run], num_threads: int) -> list[Run]:
    """Return runs for threads to take: one of a large stored tensor as often as threads may copy it, with a team."""
    found = []
    for run in runs:
        nbytes = sum(tensor.nbytes for tensor in run.tensors)
        if num_threads < 2 or nbytes < _LARGE_NBYTES or len(run.tensors) > 1 or not _is_stored(run.tensors[0]):
            found.append(run)
        else:
            shared = SharedRun(run.tensors, run.first, run.output, run.position, run.verifies, team=Team(run))
            found += [shared] * min(num_threads, nbytes // _SHARE_NBYTES)
    return found


def _is_stored(tensor: TensorAt) -> bool:
    """Return whether a tensor's bytes can be read in any order: computed ones are made from front to back."""
    return all(isinstance(stored_file(piece.file), LocalFile) for piece in pieces_of(tensor))
