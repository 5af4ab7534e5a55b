"""Commands of reshard, each in a fork of one process that has imported them, struck at their n-th change of a disk.

usage: event_worker.py [buckets | saves]; with `saves`, each job is a save of a rank that trains (see `save_once`).

Reads a job from each line of standard input: `args`, the file `said` for its output, what happens (`act`) `at` which
change, or what the server at an `endpoint` does at which request (`strike`). Answers with the exit code (a signal's is
negative) and the number of changes that were made. `later` is SIGKILL, `at` quarters of a millisecond after the first
change, and a `faulty` disk is one of `tests.process.faulty_disk`, of the seed `at`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import stores.folders.publish
from reshard import cli
from tests.process import faulty_disk

for module in (  # once, not in each fork
    "reshard.formats.export", "reshard.packing.pack", "reshard.cli.pack", "reshard.formats.dcp.read",
    "reshard.formats.huggingface.read", "reshard.formats.huggingface.write", "reshard.formats.manifest.read",
    "reshard.delta.apply", "reshard.delta.chains", "reshard.delta.publish", "reshard.cli.delta", "xxhash",
    "reshard.packing.parts_place", "reshard.packing.parts", "reshard.transforms.arithmetic",
    "zstandard",
):  # fmt: skip
    import_module(module)

KIND = sys.argv[1] if sys.argv[1:] else ""
if KIND == "saves":
    from tests.process.runner.checkpoint.save_once import save_once
elif KIND == "buckets":  # their client starts no threads before it is used
    import obstore.store  # noqa: F401

    from tests.servers.s3 import Strike, strike

CHANGES = ("rename", "replace", "link", "unlink", "mkdir", "rmdir", "fsync", "pwrite", "truncate", "chmod")
ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO, "refused": errno.EACCES}


class Disk:
    """Counts changes of a disk, and does what is asked before the one `at` which it is asked."""

    def __init__(self, act: str, at: int) -> None:
        self._timer = threading.Timer(at / 4000, os.kill, (os.getpid(), signal.SIGKILL)) if act == "later" else None
        self._act, self._at, self._lock = act, -1 if act in ("later", "faulty") else at, threading.Lock()
        self.num_changes = 0

    def counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **keywords: Any) -> Any:
            with self._lock:
                number, self.num_changes = self.num_changes, self.num_changes + 1
            if number == 0 and self._timer is not None:
                self._timer.start()
            if number == self._at or (number > self._at >= 0 and self._act == "broken"):
                self._strike()
            return change(*args, **keywords)

        return changed

    def _strike(self) -> None:
        if self._act in ERRORS:
            raise OSError(ERRORS[self._act], os.strerror(ERRORS[self._act]))
        os.kill(os.getpid(), getattr(signal, self._act))


def noting(path: str) -> Callable[..., int]:
    """Return a `pwrite` that notes in a file where what is written, before it is."""
    log, pwrite = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), os.pwrite

    def noted(descriptor: int, data: memoryview, position: int) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        os.write(log, (json.dumps([name, position, position + len(data)]) + "\n").encode())
        return pwrite(descriptor, data, position)

    return noted


def run(job: dict[str, Any]) -> None:
    """Run a command, in the place of this process."""
    said = os.open(job["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    act, at, code = job["act"], job["at"], 0
    disk = Disk(act, at)
    os.pwrite = noting(f"{job['said']}.written")
    for name in CHANGES:
        setattr(os, name, disk.counted(getattr(os, name)))
    stores.folders.publish.exchange = disk.counted(stores.folders.publish.exchange)
    if act == "faulty":
        faulty_disk.install(at)
    if job.get("strike"):
        strike(job["endpoint"], Strike(pid=os.getpid(), **job["strike"]))
    sys.argv = ["reshard", *job["args"]]
    try:
        if KIND == "saves":
            code = save_once(*job["args"])
        else:
            cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with open(f"{job['said']}.changes", "w") as file:
            file.write(str(disk.num_changes))
        sys.stdout.flush()
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        open(f"{job['said']}.changes", "w").close()
        if not (child := os.fork()):
            try:
                run(job)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(f"{job['said']}.changes") as file:
            print(json.dumps({"code": code, "changes": int(file.read() or 0)}), flush=True)


if __name__ == "__main__":
    main()
