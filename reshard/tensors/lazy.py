"""Files that are computed when they are read, as plan entries with a transform are, or that are in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import eq
from typing import Protocol

from manifests.digest import Hasher
from manifests.index import split_by_size
from manifests.jsontext import MAX_CONFIG_NBYTES
from manifests.safetensors import nbytes_of
from reshard.tensors.checkpoint import check_digest
from stores.base import Folder, InputFile, Range, Reader, read_head, read_whole
from stores.bundles import TensorAt
from stores.prefetch import Prefetcher, RemoteFile
from stores.workers import at_once

WOULD_OVERFLOW = "source.would-overflow"  # code of errors about values that a cast would make infinite
OTHER_ADAPTER = "source.other-adapter"  # of errors about an adapter of other weights than are read
STEP_NBYTES = 1 << 20  # stays in the processor's cache between read, hash, transform and write

Buffer = bytes | bytearray | memoryview


class Filler(Protocol):
    """Computes bytes in order, in the memory where they are wanted."""

    def fill(self, part: memoryview) -> None: ...

    def close(self) -> None: ...


Make = Callable[[], Iterator[Buffer] | Filler]


@dataclass(frozen=True, slots=True)
class DerivedFile:
    """A tensor's bytes as a virtual file; each read recomputes them, in order.

    Its origins are read once, and verified against their digests if they have any.
    """

    how: str  # in messages, and in the journal of what was written: `as BF16`; with numbers that config.json has
    origins: tuple[TensorAt, ...]
    nbytes: int
    make: Make = field(compare=False)  # yields or fills in the bytes; determined by the other fields

    def __str__(self) -> str:
        return f"{self.origins[0].file}, {self.how}"

    @property
    def fingerprint(self) -> str:
        return "; ".join(f"{origin.file.fingerprint}, from byte {origin.begin}" for origin in self.origins)

    def open(self, ranges: Sequence[Range]) -> BlockReader:
        return BlockReader(self.nbytes, self.make)


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A small file in memory; `pin` is the fingerprint of the one that it was read from."""

    name: str
    data: bytes
    pin: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def fingerprint(self) -> str:
        return self.pin or f"{len(self.data)} bytes in memory"

    def open(self, ranges: Sequence[Range]) -> BlockReader:
        return BlockReader(self.nbytes, lambda: iter((self.data,)))


def derive(tensor: TensorAt, dtype: str, how: str, origins: tuple[TensorAt, ...], make: Make) -> TensorAt:
    """Return a tensor of the same name and shape with computed bytes, whose digest is not known yet."""
    nbytes = nbytes_of(dtype, tensor.shape)
    file = DerivedFile(how, origins, nbytes, make)
    return replace(tensor, dtype=dtype, file=file, begin=0, nbytes=nbytes, blake3=None)


def stored_origins(tensor: TensorAt) -> Iterator[TensorAt]:
    """Yield the tensors that reading a tensor reads from files: of a derived one, its origins."""
    file = tensor.file
    return chain.from_iterable(map(stored_origins, file.origins)) if isinstance(file, DerivedFile) else iter((tensor,))


def stored_nbytes(tensor: TensorAt) -> int:
    """Return the bytes that reading a tensor reads from files."""
    return sum(origin.nbytes for origin in stored_origins(tensor))


_PREFETCHER = ContextVar[Prefetcher | None]("prefetcher", default=None)


@contextmanager
def fetching_with(prefetcher: Prefetcher) -> Iterator[None]:
    """Fetch what derived tensors are made of with `prefetcher`, if this thread reads them in the block.

    Otherwise each of their remote files is read ahead in requests and memory of its own.
    """
    before = _PREFETCHER.set(prefetcher)
    try:
        yield
    finally:
        _PREFETCHER.reset(before)


def open_origin(tensor: TensorAt, step: int = STEP_NBYTES) -> Reader:
    """Open the file of a tensor, to read it in order. Of several that are read at a time, each has a shorter `step`."""
    if (prefetcher := _PREFETCHER.get()) is None:
        return tensor.file.open(((tensor.begin, tensor.end),))
    share_nbytes = prefetcher.share_nbytes * min(step, STEP_NBYTES) // STEP_NBYTES
    return prefetcher.open(tensor.file, tensor.begin, tensor.end, share_nbytes)


def read_blocks(tensor: TensorAt, step: int = STEP_NBYTES) -> Generator[memoryview]:
    """Yield a tensor's bytes, `step` at a time and fewer at the end. A block is valid until the next."""
    hasher, buffer = Hasher(), memoryview(bytearray(min(step, tensor.nbytes)))
    with closing(open_origin(tensor, step)) as reader:
        for begin in range(tensor.begin, tensor.end, step):
            block = buffer[: tensor.end - begin]
            reader.read_into(block, begin)
            if tensor.blake3 is not None:
                hasher.update(block)
            yield block
    if tensor.blake3 is not None:
        check_digest(tensor, hasher.hexdigest())


def have_equal_bytes(first: TensorAt, second: TensorAt) -> bool:
    """Return whether two tensors are of one dtype and shape, and have equal digests, or else bytes, which are read."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if (first.file, first.begin) == (second.file, second.begin):
        return True
    if first.blake3 is not None and second.blake3 is not None:
        return first.blake3 == second.blake3
    return all(map(eq, read_blocks(first), read_blocks(second)))


class BlockReader:
    """Reads blocks in pieces of any length, in order; starts again at position 0."""

    def __init__(self, nbytes: int, make: Make) -> None:
        self._nbytes, self._make, self._blocks = nbytes, make, make()
        self._rest, self._position = memoryview(b""), 0

    def read_into(self, part: memoryview, position: int | None = None) -> None:
        """Fill `part` with the next bytes, which are those at `position`."""
        if position == 0 < self._position:
            self.close()
            self._blocks, self._rest, self._position = self._make(), memoryview(b""), 0
        assert position in (None, self._position), "derived bytes are read in order"
        if not isinstance(self._blocks, Iterator):
            self._blocks.fill(part)
            self._position += len(part)
            return
        while part:
            if not self._rest:
                self._rest = memoryview(next(self._blocks)).cast("B")
            count = min(len(part), len(self._rest))
            part[:count] = self._rest[:count]
            part, self._rest = part[count:], self._rest[count:]
            self._position += count
        if self._position == self._nbytes:
            assert next(self._blocks, None) is None, (
                "more bytes than planned"
            )  # lets the generator check what was read last

    def close(self) -> None:
        if isinstance(self._blocks, Generator) or not isinstance(self._blocks, Iterator):
            self._blocks.close()


_MOST_NBYTES = 64 << 20  # in memory at a time
_MOST_HEADS = 256  # of 128 KiB


def read_together(files: Sequence[InputFile]) -> Iterator[InputFile]:
    """Yield files in order; remote ones are in memory, unless they are long."""
    for batch in split_by_size(files, lambda file: file.nbytes, _MOST_NBYTES):
        remote = [file for file in batch if isinstance(file, RemoteFile) and file.nbytes <= MAX_CONFIG_NBYTES]
        data = at_once({file: partial(read_whole, file) for file in remote})
        for file in batch:
            yield MemoryFile(str(file), data.pop(file).result(), file.fingerprint) if file in data else file


class FolderInPart:
    """A folder, whose files of these names are read together now, and with them the `heads` of remote shards."""

    def __init__(self, folder: Folder, names: Sequence[str], shards: Sequence[str]) -> None:
        self._folder = folder
        files = [folder.file(name) for name in names]
        remote = [file for file in map(folder.file, shards[:_MOST_HEADS]) if isinstance(file, RemoteFile)]
        calls: dict[InputFile, Callable[[], bytes]] = {file: partial(read_head, file) for file in remote}
        with ThreadPoolExecutor(1, thread_name_prefix="heads") as beside:
            heads = beside.submit(at_once, calls)
            self._read = dict(zip(names, read_together(files), strict=True))
        self.heads = heads.result()  # a failure is raised where one is used
        self.kind, self.location, self.revision = folder.kind, folder.location, folder.revision

    def __str__(self) -> str:
        return str(self._folder)

    def names(self) -> tuple[str, ...]:
        return self._folder.names()

    def file(self, name: str) -> InputFile:
        return self._read.get(name) or self._folder.file(name)
