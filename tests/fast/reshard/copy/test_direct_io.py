"""Files that are written through the page cache leave it again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard.copy.direct_io import BLOCK_NBYTES, Io, OutputFile, aligned_buffer

NUM_BLOCKS = 40


def write(path: Path, io: Io, *, is_synced: bool) -> list[int]:
    """Write a file of different blocks from the last to the first half; return the cached ones, before it is synced."""
    buffer, file = aligned_buffer(), OutputFile(path, NUM_BLOCKS * BLOCK_NBYTES, io, is_synced=is_synced)
    for number in (*range(NUM_BLOCKS // 2, NUM_BLOCKS), *range(NUM_BLOCKS // 2)):
        buffer[:] = bytes([number]) * BLOCK_NBYTES
        file.write(buffer, 0, BLOCK_NBYTES, number * BLOCK_NBYTES)
    file.finish((), sync=is_synced)
    return [number for number in range(NUM_BLOCKS) if is_cached(path, number * BLOCK_NBYTES)]


def is_cached(path: Path, position: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], position, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("real_fsync")
def test_what_was_written_and_synced_is_not_in_the_page_cache(tmp_path: Path) -> None:
    kept = write(tmp_path / "kept", "buffered", is_synced=False)
    assert len(kept) > NUM_BLOCKS // 2
    descriptor = os.open(tmp_path / "kept", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if is_cached(tmp_path / "kept", 0):
        pytest.skip("a file system in memory")
    assert write(tmp_path / "synced", "buffered", is_synced=True) == []


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("is_synced", [True, False])
def test_a_file_has_its_bytes_in_whatever_order_they_are_written(tmp_path: Path, io: Io, is_synced: bool) -> None:
    write(tmp_path / "file", io, is_synced=is_synced)
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(bytes([number]) * BLOCK_NBYTES for number in range(NUM_BLOCKS))
