"""Both states of tensors, read once, hashed and compared; their differences are compressed and spooled to disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import ByteCounter
from reshard.formats.delta.codec import Encoder
from reshard.tensors.checkpoint import check_digest
from reshard.tensors.lazy import read_blocks
from stores.bundles import TensorAt
from stores.local import LocalFile
from stores.workers import Take, share_out

Writing = Callable[[], AbstractContextManager[None]]  # raises errors of a disk as those of an output


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Both states of a tensor, with digests, and the compressed difference, unless they are equal."""

    old: TensorAt
    new: TensorAt
    stored: TensorAt | None
    num_changed: int


def compare_states(
    pairs: Sequence[tuple[TensorAt, TensorAt]],
    spool: Path,
    writing: Writing,
    parallelism: Parallelism,
    progress: ByteCounter,
) -> dict[str, Difference]:
    """Read both states of tensors, in several threads, and spool the differences; return them in that order.

    Only what is written to the folder `spool` is done while `writing`.
    """
    differences: dict[str, Difference] = {}

    def compare(take: Take[tuple[TensorAt, TensorAt]], stop: threading.Event) -> None:
        path = spool / f"{threading.get_ident()}.zst"
        with closing(_SpoolFile(path, writing)) as file:
            while not stop.is_set() and (pair := take()) is not None:
                old, new = pair
                begin, encoder = file.nbytes, Encoder(new.nbytes, file.write)
                blocks = (read_blocks(replace(tensor, blake3=None)) for tensor in pair)  # the encoder hashes them
                for before, after in zip(*blocks, strict=True):
                    if stop.is_set():
                        return
                    encoder.add(before, after)
                    progress(len(before) + len(after))
                digests = encoder.finish()
                for tensor, digest in zip(pair, digests, strict=True):
                    check_digest(tensor, digest.hex())
                nbytes = file.nbytes - begin
                differences[new.name] = Difference(
                    old=replace(old, blake3=digests[0]),
                    new=replace(new, blake3=digests[1]),
                    stored=TensorAt(new.name, "U8", (nbytes,), LocalFile(path, may_change=True), begin, nbytes)
                    if nbytes
                    else None,
                    num_changed=encoder.num_changed,
                )

    share_out(pairs, compare, parallelism.threads_for(len(pairs)))
    return {new.name: differences[new.name] for _, new in pairs}


class _SpoolFile:
    """A file to which a thread appends."""

    def __init__(self, path: Path, writing: Writing) -> None:
        self._writing = writing
        with writing():
            self._file = open(path, "ab")  # noqa: SIM115 - until it is closed

    @property
    def nbytes(self) -> int:
        return self._file.tell()

    def write(self, data: bytes) -> None:
        with self._writing():
            self._file.write(data)

    def close(self) -> None:
        with self._writing():
            self._file.close()
