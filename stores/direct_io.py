"""Files written in blocks, with O_DIRECT where the file system supports it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

BLOCK_NBYTES = 1 << 20  # fits into the CPU cache between read, hash and write
_SECTOR_NBYTES = max(4096, mmap.PAGESIZE)  # no page of the cache is written both ways; some kernels' have 64 KiB
_WINDOW_NBYTES = 8 << 20

Io = Literal["direct", "buffered"]


def aligned_buffer(nbytes: int = BLOCK_NBYTES) -> memoryview:
    """Return page-aligned memory, as direct writes require."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class OutputFile:
    """One file under construction, written at any position by several threads; existing contents are kept.

    With `direct`, whole sectors bypass the page cache, so that there is nothing to flush at the end. Partial sectors,
    and file systems without O_DIRECT, go through it; a file that `is_synced` leaves it while it is written.
    """

    def __init__(self, path: Path, nbytes: int, io: Io, *, is_synced: bool = False) -> None:
        self.path, self._is_synced = path, is_synced
        self._buffered = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        os.truncate(self._buffered, nbytes)
        self._direct = _open_direct(path) if io == "direct" else None
        self._is_open = True

    @property
    def is_aligned(self) -> bool:
        return self._direct is not None

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`; if it is aligned, both are equal modulo a sector."""
        first = begin + -begin % _SECTOR_NBYTES
        last = end - end % _SECTOR_NBYTES
        if self._direct is None or first >= last:
            self._write_behind(buffer[begin:end], position)
            return
        _write_all(self._buffered, buffer[begin:first], position)
        try:
            _write_all(self._direct, buffer[first:last], position + first - begin)
        except OSError as error:
            if error.errno != errno.EINVAL:  # not supported by this file system after all
                raise
            self._write_behind(buffer[first:last], position + first - begin)
        _write_all(self._buffered, buffer[last:end], position + last - begin)

    def finish(self, header: bytes, *, sync: bool) -> None:
        """Write the start of the file, flush all of it to disk if asked, and close it."""
        try:
            _write_all(self._buffered, memoryview(header), 0)
            if sync:
                self.sync()
        finally:
            self.close()

    def sync(self) -> None:
        """Flush what was written to disk; if that fails, discard it: it would be read as if it were there."""
        try:
            os.fsync(self._buffered)
        except OSError:
            with suppress(OSError):  # read-only since then, perhaps
                os.truncate(self._buffered, 0)
            raise
        self._let_go(0, 0)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._is_open:
            self._is_open = False
            os.close(self._buffered)
            if self._direct is not None:
                os.close(self._direct)

    def _write_behind(self, part: memoryview, position: int) -> None:
        """Write through the page cache, which a file of many GB would fill: then the kernel reclaims it page by page.

        The first advice for a window starts to write it to disk; the second, one window later, frees what is there.
        """
        _write_all(self._buffered, part, position)
        end = (position + len(part)) // _WINDOW_NBYTES * _WINDOW_NBYTES
        if end > position:
            self._let_go(end - _WINDOW_NBYTES, _WINDOW_NBYTES)
            self._let_go(max(0, end - 2 * _WINDOW_NBYTES), _WINDOW_NBYTES)

    def _let_go(self, begin: int, nbytes: int) -> None:
        if self._is_synced:
            os.posix_fadvise(self._buffered, begin, nbytes, os.POSIX_FADV_DONTNEED)


class SequentialFile(OutputFile):
    """One file under construction, written from front to back in blocks of at most `block_nbytes`.

    A long part whose sectors are sectors of the file is written from where it is; others are copied into a block.
    """

    def __init__(self, path: Path, nbytes: int, block_nbytes: int) -> None:
        super().__init__(path, nbytes, "direct", is_synced=True)
        self._block, self._position, self._filled_nbytes = aligned_buffer(min(block_nbytes, nbytes)), 0, 0

    def append(self, part: bytes | memoryview) -> None:
        """Write the next bytes, or keep them until a block is full."""
        part = memoryview(part)
        if self._is_written_in_place(part):
            self._write_block()
            nbytes = len(part) - len(part) % _SECTOR_NBYTES
            self.write(part, 0, nbytes, self._position)
            self._position, part = self._position + nbytes, part[nbytes:]
        while part:
            room = self._block[self._filled_nbytes :][: len(part)]
            room[:], part = part[: len(room)], part[len(room) :]
            self._filled_nbytes += len(room)
            if self._filled_nbytes == len(self._block):
                self._write_block()

    def finish(self, header: bytes, *, sync: bool = True) -> None:
        self._write_block()
        super().finish(header, sync=sync)

    def _is_written_in_place(self, part: memoryview) -> bool:
        if part.readonly or 2 * len(part) < len(self._block):
            return False
        address = ctypes.addressof(ctypes.c_char.from_buffer(part))
        return not any(at % _SECTOR_NBYTES for at in (address, self._position + self._filled_nbytes))

    def _write_block(self) -> None:
        self.write(self._block, 0, self._filled_nbytes, self._position)
        self._position, self._filled_nbytes = self._position + self._filled_nbytes, 0


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # tmpfs and some network file systems
        return None


def _write_all(descriptor: int, part: memoryview, position: int) -> None:
    while part:
        written = os.pwrite(descriptor, part, position)
        part, position = part[written:], position + written
