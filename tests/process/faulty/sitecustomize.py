"""On a process's PYTHONPATH with FAULTS=SEED: a disk that reads and writes short, and fails now and then."""

import errno
import os
import random

_RARE = 0.004
_FAILURES = (errno.EIO, errno.ENOSPC, errno.EINTR)


def _install(seed):
    chance = random.Random(seed)
    preadv, pwrite, fsync, replace = os.preadv, os.pwrite, os.fsync, os.replace

    def may_fail():
        if chance.random() < _RARE:
            code = chance.choice(_FAILURES)
            raise OSError(code, os.strerror(code))

    def faulty_preadv(descriptor, buffers, offset, *rest):
        may_fail()
        (buffer,) = buffers
        if len(buffer) > 1 and chance.random() < 0.3:
            buffer = memoryview(buffer)[: chance.randrange(1, len(buffer))]
        return preadv(descriptor, [buffer], offset, *rest)

    def faulty_pwrite(descriptor, data, offset):
        may_fail()
        if len(data) > 8192 and chance.random() < 0.3:
            data = memoryview(data)[: 4096 * chance.randrange(1, len(data) // 4096)]
        return pwrite(descriptor, data, offset)

    def faulty_fsync(descriptor):
        may_fail()
        return fsync(descriptor)

    def faulty_replace(*arguments):
        may_fail()
        return replace(*arguments)

    os.preadv, os.pwrite, os.fsync, os.replace = faulty_preadv, faulty_pwrite, faulty_fsync, faulty_replace


if "FAULTS" in os.environ:
    _install(int(os.environ["FAULTS"]))
