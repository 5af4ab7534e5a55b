"""The one executor of plans: byte ranges from files to files, hashed on the way.

Memory: `NUM_THREADS` buffers of `BUFFER_NBYTES`, whatever the size of the model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from manifests.digest import Hasher, digest_bytes
from manifests.errors import InputError
from manifests.safetensors import header_template
from reshard.checkpoint import TensorAt
from reshard.plan import OutputShard

__all__ = ["BUFFER_NBYTES", "NUM_THREADS", "WrittenShard", "hash_tensors", "write_shards"]

BUFFER_NBYTES = 1 << 20  # stays in the processor's cache between read, hash and write
NUM_THREADS = 2
_RUN_NBYTES = 64 << 20  # a run is one thread's piece of work: whole tensors, about this long

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """A shard on disk: its size, its digest, and its tensors' hex digests by FQN."""

    path: str
    nbytes: int
    digest: str
    tensor_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor on its way: where its bytes go in the output file (None: hashed, not written)."""

    origin: TensorAt
    output: Path | None
    position: int


def write_shards(
    shards: Sequence[OutputShard], folder: Path, progress: Progress = lambda nbytes: None
) -> tuple[WrittenShard, ...]:
    """Write shards below `folder` and bring them to disk.

    Every byte is read once and hashed as it passes; a tensor whose digest is known must match it.

    Raises:
        InputError: a source file is shorter than planned, or a tensor's bytes are not what its
            digest says.
    """
    pieces = []
    for shard in shards:
        path = folder / shard.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _reserve(path, shard)
        start = len(shard.header)
        pieces += [
            _Piece(origin, path, start + entry.begin)
            for entry, origin in sorted(zip(shard.entries, shard.origins, strict=True), key=lambda pair: pair[0].begin)
        ]
    digests = _carry_out(pieces, progress)
    written, first = [], 0
    for shard in shards:
        last = first + len(shard.entries)
        named = {
            piece.origin.name: digest for piece, digest in zip(pieces[first:last], digests[first:last], strict=True)
        }
        written.append(_finish(folder / shard.path, shard, named))
        first = last
    return tuple(written)


def hash_tensors(tensors: Sequence[TensorAt], progress: Progress = lambda nbytes: None) -> tuple[str, ...]:
    """Give the hex digest of each tensor's bytes; known digests are not consulted."""
    return tuple(_carry_out([_Piece(_unknown(tensor), None, 0) for tensor in tensors], progress))


def _reserve(path: Path, shard: OutputShard) -> None:
    """Make the file at its full size, so that a full disk is met before the bytes move."""
    with open(path, "wb") as file:
        if shard.nbytes:
            os.posix_fallocate(file.fileno(), 0, shard.nbytes)
        file.write(shard.header)


def _finish(path: Path, shard: OutputShard, digests: Mapping[str, str]) -> WrittenShard:
    header = header_template(shard.entries, {}, digests) if shard.with_digests else shard.header
    with open(path, "r+b") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=digest_bytes(header), tensor_digests=digests)


def _carry_out(pieces: Sequence[_Piece], progress: Progress) -> list[str]:
    """Move and hash every piece, in runs shared out to a few threads; the first failure stops all."""
    stop = threading.Event()
    with _open_files(pieces) as (sources, outputs), ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            jobs = [pool.submit(_carry_run, run, sources, outputs, progress, stop) for run in _runs(pieces)]
            wait(jobs, return_when=FIRST_EXCEPTION)
            failed = next((job for job in jobs if job.done() and job.exception()), None)
            return [digest for job in ([failed] if failed else jobs) for digest in job.result()]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _open_files(pieces: Sequence[_Piece]) -> Iterator[tuple[dict[Path, int], dict[Path, int]]]:
    with ExitStack() as stack:

        def opened(paths: set[Path], flags: int) -> dict[Path, int]:
            descriptors = {}
            for path in paths:
                try:
                    descriptors[path] = os.open(path, flags | os.O_CLOEXEC)
                except OSError as error:
                    raise InputError(str(path), f"cannot be opened: {error.strerror}") from error
                stack.callback(os.close, descriptors[path])
            return descriptors

        sources = opened({piece.origin.path for piece in pieces}, os.O_RDONLY)
        yield sources, opened({piece.output for piece in pieces if piece.output}, os.O_WRONLY)


def _runs(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Cut pieces into runs of whole tensors, in order."""
    run: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        if run and nbytes + piece.origin.nbytes > _RUN_NBYTES:
            yield run
            run, nbytes = [], 0
        run.append(piece)
        nbytes += piece.origin.nbytes
    if run:
        yield run


def _carry_run(
    run: list[_Piece],
    sources: Mapping[Path, int],
    outputs: Mapping[Path, int],
    progress: Progress,
    stop: threading.Event,
) -> list[str]:
    buffer = memoryview(bytearray(BUFFER_NBYTES))
    digests = []
    for piece in run:
        origin, hasher, moved = piece.origin, Hasher(), 0
        source = sources[origin.path]
        while moved < origin.nbytes and not stop.is_set():
            part = buffer[: min(BUFFER_NBYTES, origin.nbytes - moved)]
            found = _read_some(source, part, origin, moved)
            part = part[:found]
            hasher.update(part)
            if piece.output is not None:
                _write_all(outputs[piece.output], part, piece.position + moved)
            moved += found
            progress(found)
        digests.append(hasher.hexdigest())
        if origin.digest is not None and digests[-1] != origin.digest and not stop.is_set():
            raise InputError(
                f"{origin.path}: {origin.name!r}",
                f"expected blake3:{origin.digest}, found blake3:{digests[-1]}",
                "the shard was changed or damaged after it was written; pack it again from its source",
            )
    return digests


def _read_some(descriptor: int, part: memoryview, origin: TensorAt, moved: int) -> int:
    try:
        found = os.preadv(descriptor, [part], origin.begin + moved)
    except OSError as error:
        raise InputError(str(origin.path), f"cannot be read: {error.strerror}") from error
    if found == 0:
        raise InputError(str(origin.path), f"ends within {origin.name!r}", "the file was cut short while it was read")
    return found


def _write_all(descriptor: int, part: memoryview, position: int) -> None:
    while part:
        written = os.pwrite(descriptor, part, position)
        part, position = part[written:], position + written


def _unknown(tensor: TensorAt) -> TensorAt:
    return TensorAt(tensor.name, tensor.dtype, tensor.shape, tensor.path, tensor.begin, tensor.nbytes)
