"""A disk that reads and writes short, and fails now and then."""

from __future__ import annotations

import errno
import os
import random
from typing import Any

_RARE = 0.02
_FAILURES = (errno.EIO, errno.ENOSPC, errno.EINTR)


def install(seed: int) -> None:
    """Make this process's disk such a one."""
    chance = random.Random(seed)
    preadv, pwrite, fsync, replace = os.preadv, os.pwrite, os.fsync, os.replace

    def may_fail() -> None:
        if chance.random() < _RARE:
            code = chance.choice(_FAILURES)
            raise OSError(code, os.strerror(code))

    def faulty_preadv(descriptor: int, buffers: Any, offset: int, *rest: int) -> int:
        may_fail()
        (buffer,) = buffers
        if len(buffer) > 1 and chance.random() < 0.3:
            buffer = memoryview(buffer)[: chance.randrange(1, len(buffer))]
        return preadv(descriptor, [buffer], offset, *rest)

    def faulty_pwrite(descriptor: int, data: Any, offset: int) -> int:
        may_fail()
        if len(data) > 8192 and chance.random() < 0.3:
            data = memoryview(data)[: 4096 * chance.randrange(1, len(data) // 4096)]
        return pwrite(descriptor, data, offset)

    def faulty_fsync(descriptor: int) -> None:
        may_fail()
        return fsync(descriptor)

    def faulty_replace(*arguments: Any) -> None:
        may_fail()
        return replace(*arguments)

    os.preadv, os.pwrite, os.fsync, os.replace = faulty_preadv, faulty_pwrite, faulty_fsync, faulty_replace
