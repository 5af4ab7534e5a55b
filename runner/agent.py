"""torchrun, ending with our exit codes and one sentence instead of a traceback (docs/adr/0006)."""

from __future__ import annotations

import itertools
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from manifests.errors import UserError
from manifests.store import read_manifest

__all__ = ["main"]

_OUR_CODES = (1, 2, 3, 4, 5, 130)  # a worker that ended with one of these has said why
_RANK_FAILED = 5


def main() -> None:
    """Run torchrun on this process's arguments."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        sys.exit(_end(*_root_cause(error)))
    except SignalException as error:
        print(f"interrupted by {_signal_name(int(error.sigval))}", file=sys.stderr)
        sys.exit(130)


def _root_cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Give the rank that a signal ended, if any: its peers fail at once, and may be noticed before it.

    SIGTERM does not count: the agent sends it to the ranks that are left.
    """
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return rank, failure
    rank, failure = error.get_first_failure()
    return rank, failure


def _end(rank: int, failure: ProcessFailure) -> int:
    if failure.exitcode < 0:
        name = _signal_name(-failure.exitcode)
        hint = "\nhint: out of memory? the kernel kills with SIGKILL; see dmesg" if name == "SIGKILL" else ""
        print(
            f"error: rank {rank}{_place_of(rank, sys.argv)}: ended by {name}; all ranks were stopped{hint}",
            file=sys.stderr,
        )
        return _RANK_FAILED
    return failure.exitcode if failure.exitcode in _OUR_CODES else _RANK_FAILED


def _place_of(rank: int, argv: Sequence[str]) -> str:
    """Say which stages a rank holds, and on which node, where the command line tells."""
    flags = dict(itertools.pairwise(argv))
    try:
        nnodes, nproc = int(flags.get("--nnodes", "1")), int(flags["--nproc-per-node"])
        placement = read_manifest(Path(argv[argv.index("runner.worker") + 1])).placement
        stages = placement.stages_on(rank * placement.num_ranks // (nnodes * nproc))
    except (UserError, ValueError, KeyError, IndexError):
        return ""
    node = f", node {socket.gethostname()}" if nnodes > 1 else ""
    return f" (stage {', '.join(map(str, stages))}{node})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    main()
