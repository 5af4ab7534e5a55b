"""What is wrong with a machine, as torch, Python and the kernel say it, told in a sentence."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator

import torch

from manifests.errors import InputError, RankError, UnreachableError, refused_by_system

__all__ = ["ExhaustedError", "causes", "exhausted", "unreachable"]

_SAID = ("can't allocate memory", "out of memory", "std::bad_alloc", "cannot allocate memory")
_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_HINT = (
    "--ac full, --loss-chunk N, a smaller --microbatch, --dp-shard N or more stages (reshard pack MANIFEST --layout "
    "pp=N) take less; reshard plan MANIFEST says what every rank needs"
)


class ExhaustedError(RankError):
    """A rank has no memory left, on its GPU or on its node."""


def exhausted(error: BaseException) -> ExhaustedError | None:
    """Give the sentence for an error that says, or was caused by one that says, that there is no memory left.

    None: it says something else.
    """
    for said in causes(error):
        if _is_one(said):
            asked = _ASKED.search(str(said))
            wanted = f"{_shown(asked)} more could not be had" if asked else "a block could not be had"
            return ExhaustedError("", f"out of memory: {wanted}, {_used(said)}", _HINT, code="system.out-of-memory")
    return None


def unreachable(error: BaseException) -> InputError | None:
    """Give the sentence for a disk, a mount or a network that failed; None: it is something else."""
    if isinstance(error, OSError) and error.errno is not None:
        said = refused_by_system(str(error.filename or ""), error, "cannot be read or written", code="system.io")
        return said if isinstance(said, UnreachableError) else None
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Give an error and what it was raised from: torch wraps what a stage has met."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_one(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):  # which torch's own error for GPUs is, too
        return any(words in str(error).lower() for words in _SAID)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _shown(asked: re.Match[str]) -> str:
    number, unit = asked.groups()
    return f"{int(number) / 2**20:.1f} MiB" if unit == "bytes" else f"{number} {unit}"


def _used(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_allocated()
        return f"{held / 2**30:.2f} GiB are in use by this rank, {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
    return f"its process has had up to {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) / 2**30:.2f} GiB"
