"""Files that are written from front to back: parts of any size are joined to blocks, or written from where they are."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stores.direct_io import OutputFile, SequentialFile, aligned_buffer

SECTOR_NBYTES = max(4096, mmap.PAGESIZE)


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("block_nbytes", [999, 4096, 3 * 4096])
@pytest.mark.parametrize("sizes", [(4096, 4096, 8192), (5000, 1, 0, 30000, 4095), (8192, 30000, 4096, 8192), (7,)])
def test_appended_parts_follow_each_other_whatever_the_blocks_are(
    tmp_path: Path, block_nbytes: int, sizes: tuple[int, ...], is_aligned: bool
) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
    file = SequentialFile(tmp_path / "file", sum(sizes), block_nbytes)
    for part in parts:
        memory = aligned_buffer(len(part) + 1)[: len(part)]
        memory[:] = part
        file.append(memory if is_aligned else part)
    file.finish(b"head"[: sizes[0]])
    expected = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == b"head" + expected[4:]


def test_long_part_in_whole_sectors_is_written_from_where_it_is(tmp_path: Path) -> None:
    part = aligned_buffer(2 * SECTOR_NBYTES + 8)
    part[:] = b"x" * len(part)
    file = SequentialFile(tmp_path / "file", 3 * SECTOR_NBYTES + 8, 4 * SECTOR_NBYTES)
    file.append(bytes(SECTOR_NBYTES))
    file.append(part)
    in_file = (tmp_path / "file").read_bytes()
    assert in_file[SECTOR_NBYTES:] == bytes(part[:-8]) + bytes(8)  # its end, less than a sector, is in a block
    file.finish(b"head")
    assert (tmp_path / "file").read_bytes()[SECTOR_NBYTES:] == bytes(part)


@pytest.mark.parametrize(("truncate", "kept"), [(errno.EROFS, b"headents"), (None, b"")])
def test_what_cannot_be_brought_to_disk_is_not_read_again(
    truncate: int | None, kept: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells of a page that was not written once, and then has it in its cache as if it were on disk.

    After an I/O error the file system may be read-only.
    """

    def fails(number: int) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    file = OutputFile(tmp_path / "file", 8, "buffered", is_synced=True)
    file.write(memoryview(b"contents"), 0, 8, 0)
    monkeypatch.setattr(os, "fsync", fails(errno.EIO))
    if truncate is not None:
        monkeypatch.setattr(os, "truncate", fails(truncate))
    with pytest.raises(OSError, match="Input/output error"):
        file.finish(b"head", sync=True)
    assert (tmp_path / "file").read_bytes() == kept
