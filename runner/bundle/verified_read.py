"""Reading a shard from front to back while verifying its digests. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from manifests.digest import PREFIX, Hasher
from manifests.errors import ShardError
from manifests.schema import Shard
from manifests.store import check_shard
from stores.base import InputFile, read_file_header
from stores.bundles import TensorAt, tensors_in

_BLOCK_NBYTES = 8 << 20


def verified_blocks(file: InputFile, shard: Shard, beat: Callable[[], None]) -> Iterator[bytes | memoryview]:
    """Yield a shard's bytes from front to back, each block valid until the next; at the end all are verified.

    `beat` is called when a block has been read, and may raise to end it.
    """
    check_shard(str(file), shard, file.nbytes)
    header = read_file_header(file)
    check_shard(str(file), shard, file.nbytes, header)
    yield len(header.raw).to_bytes(header.nbytes - len(header.raw), "little")
    yield header.raw
    tensors = _Digests(tensors_in(file, header, header.digest_table(str(file))))
    for position, block in _blocks(file, header.nbytes, shard.nbytes):
        beat()
        tensors.update(block, position)
        yield block


def check_digest(tensor: TensorAt, digest: str) -> None:
    """Compare the hex digest of a tensor's bytes with that of its shard."""
    if digest != tensor.digest:
        raise ShardError(
            tensor.place,
            f"expected {PREFIX}{tensor.digest}, found {PREFIX}{digest}",
            "the shard was damaged after it was written; reshard verify names all damage",
            code="shard.digest-mismatch",
        )


class _Digests:
    """Verifies tensors as their bytes are read, in order."""

    def __init__(self, tensors: Iterable[TensorAt]) -> None:
        self._tensors, self._hasher = deque(tensors), Hasher()

    def update(self, block: memoryview, position: int) -> None:
        """Hash the bytes at `position` of the file, which follow those of the last call."""
        while block:
            tensor = self._tensors[0]
            count = min(len(block), tensor.end - position)
            self._hasher.update(block[:count])
            block, position = block[count:], position + count
            if position == tensor.end:
                self._end(self._tensors.popleft())

    def _end(self, tensor: TensorAt) -> None:
        digest, self._hasher = self._hasher.hexdigest(), Hasher()
        check_digest(tensor, digest)


def _blocks(file: InputFile, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield a file's bytes with their positions, reading each block while the previous one is used."""
    buffers = tuple(memoryview(bytearray(min(_BLOCK_NBYTES, end - begin))) for _ in range(2))
    with closing(file.open(((begin, end),))) as reader, ThreadPoolExecutor(1, thread_name_prefix="copy") as pool:

        def read(number: int) -> tuple[int, memoryview]:
            position = begin + number * _BLOCK_NBYTES
            block = buffers[number % 2][: min(_BLOCK_NBYTES, end - position)]
            reader.read_into(block, position)
            return position, block

        num_blocks = -(-(end - begin) // _BLOCK_NBYTES)
        ahead = pool.submit(read, 0) if num_blocks else None
        for number in range(num_blocks):
            assert ahead is not None
            placed_block = ahead.result()
            if number + 1 < num_blocks:
                ahead = pool.submit(read, number + 1)
            yield placed_block
