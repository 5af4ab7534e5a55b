"""Out of memory, disk and network errors of torch, Python and the kernel, as errors with one sentence."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator

import torch

from manifests.command.sizes import show_bytes
from manifests.errors import InputError, RankError, UnreachableError, refused_by_system

_SAID = ("can't allocate memory", "out of memory", "std::bad_alloc", "cannot allocate memory")
_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_HINT = (
    "--ac full, --loss-chunk N, a smaller --microbatch, --dp-shard N or more stages (reshard pack MANIFEST --layout "
    "pp=N) reduce memory; reshard plan MANIFEST shows what each rank needs"
)


class ExhaustedError(RankError):
    """A rank is out of memory, on its GPU or its node."""


def exhausted(error: BaseException) -> ExhaustedError | None:
    """Return the error to report if this one, or one that caused it, means out of memory; otherwise None."""
    for said in causes(error):
        if _is_one(said):
            asked = _ASKED.search(str(said))
            wanted = f"failed to allocate {_shown(asked)}" if asked else "an allocation failed"
            return ExhaustedError("", f"out of memory: {wanted}; {_used(said)}", _HINT, code="system.out-of-memory")
    return None


def unreachable(error: BaseException) -> InputError | None:
    """Return the error to report if this one means a failed disk, mount or network; otherwise None."""
    if isinstance(error, OSError) and error.errno is not None:
        said = refused_by_system(str(error.filename or ""), error, "cannot be read or written", code="system.io")
        return said if isinstance(said, UnreachableError) else None
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from: torch wraps the errors of stages."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_one(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):  # includes torch.OutOfMemoryError
        return any(words in str(error).lower() for words in _SAID)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _shown(asked: re.Match[str]) -> str:
    number, unit = asked.groups()
    return f"{int(number) / 2**20:.1f} MiB" if unit == "bytes" else f"{number} {unit}"


def _used(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = torch.cuda.memory_allocated()
        return f"this rank uses {show_bytes(used)}, {show_bytes(free)} of {show_bytes(total)} are free"
    return f"peak memory of its process: {show_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)}"
