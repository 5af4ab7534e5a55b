"""Moves one object to or from a bucket, or a model: `read URL NAME`, `write URL NAME NBYTES`, `pack SOURCE URL`."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
from pathlib import Path

BLOCK_NBYTES = 1 << 20


def read(url: str, name: str) -> tuple[int, str]:
    from stores.objects.store import open_objects

    file = open_objects(url).file(name)
    reader, block, digest, peak_nbytes = file.open([(0, file.nbytes)]), bytearray(BLOCK_NBYTES), hashlib.sha256(), 0
    for position in range(0, file.nbytes, BLOCK_NBYTES):
        part = memoryview(block)[: min(BLOCK_NBYTES, file.nbytes - position)]
        reader.read_into(part, position)
        digest.update(part)
        peak_nbytes = max(peak_nbytes, anonymous_nbytes())
    reader.close()
    return peak_nbytes, digest.hexdigest()


def write(url: str, name: str, nbytes: int) -> tuple[int, str]:
    """Write a header of one block and random blocks after it, all through one buffer."""
    from stores.objects.output import open_output

    generator, block, digest, peak_nbytes = random.Random(0), bytearray(BLOCK_NBYTES), hashlib.sha256(), 0
    with open_output(url) as target:
        header = generator.randbytes(BLOCK_NBYTES)
        digest.update(header)
        writer = target.writer(name, nbytes, header)
        for position in range(BLOCK_NBYTES, nbytes, BLOCK_NBYTES):
            block[:] = generator.randbytes(BLOCK_NBYTES)
            digest.update(block)
            writer.write(memoryview(block), 0, BLOCK_NBYTES, position)
            peak_nbytes = max(peak_nbytes, anonymous_nbytes())
            print(position, flush=True)
        writer.finish()
        target.commit(b"{}")
    return peak_nbytes, digest.hexdigest()


def pack(source: str, url: str, *options: str) -> int:
    """Run the command, and look at this process a hundred times a second."""
    from reshard.cli import main

    peak_nbytes, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak_nbytes
        while not ended.wait(0.01):
            peak_nbytes = max(peak_nbytes, anonymous_nbytes())

    sys.argv = ["reshard", "pack", source, "--layout", "pp=2", "--out", url, *options]
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        main()
    finally:
        ended.set()
        watcher.join()
    return peak_nbytes


def anonymous_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


if __name__ == "__main__":
    verb, first, second, *more = sys.argv[1:]
    if verb == "pack":
        peak_nbytes, digest = pack(first, second, *more), ""
    else:
        peak_nbytes, digest = read(first, second) if verb == "read" else write(first, second, int(more[0]))
    print(json.dumps({"peak_nbytes": peak_nbytes, "sha256": digest}))
