"""On a rank's PYTHONPATH: it dies as it starts (DIE_RANK), or fails by itself when it gets SIGUSR1 (FAULT).

A disk fails wherever a file below a folder of this name is read (BROKEN_DISK), or does not answer when one is to be
brought to it (HANGING_DISK) or opened to be read (HANGING_READS).
"""

import ctypes
import errno
import os
import signal
import time


def sleep():
    time.sleep(600)


def sleep_with_lock():
    """Let no other thread of this process run Python."""
    ctypes.PyDLL(None).sleep(600)


def allocate():
    """Ask torch for more memory than there is, by the thread that computes: another one's C++ would abort."""
    import torch

    torch.empty(1 << 50, dtype=torch.uint8)


def fill():
    """Write to memory that the process did not have."""
    bytearray(os.urandom(1 << 20) * 64)


def break_disk(name):
    preadv = os.preadv

    def broken_preadv(descriptor, buffers, offset, *rest):
        if f"/{name}/" in os.readlink(f"/proc/self/fd/{descriptor}") + "/":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset, *rest)

    os.preadv = broken_preadv


def hang_disk(name):
    fsync = os.fsync

    def hanging_fsync(descriptor):
        if f"/{name}/" in os.readlink(f"/proc/self/fd/{descriptor}") + "/":
            time.sleep(600)
        fsync(descriptor)

    os.fsync = hanging_fsync


def hang_reads(name):
    open_file = os.open

    def hanging_open(path, flags, *args, **named):
        if f"/{name}/" in f"{path}/" and not flags & os.O_CREAT:
            time.sleep(600)
        return open_file(path, flags, *args, **named)

    os.open = hanging_open


if "RANK" in os.environ and "HANGING_READS" in os.environ:
    hang_reads(os.environ["HANGING_READS"])
if "RANK" in os.environ and "HANGING_DISK" in os.environ:
    hang_disk(os.environ["HANGING_DISK"])
if "RANK" in os.environ and "BROKEN_DISK" in os.environ:
    break_disk(os.environ["BROKEN_DISK"])
if "RANK" in os.environ and os.environ.get("DIE_RANK") == os.environ["RANK"]:
    os.kill(os.getpid(), signal.SIGKILL)
if "RANK" in os.environ and "FAULT" in os.environ:
    signal.signal(signal.SIGUSR1, lambda *_: globals()[os.environ["FAULT"]]())
