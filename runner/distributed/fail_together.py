"""Fail together: an error on one rank ends all ranks, with one message that names the rank."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from manifests.command.sizes import show_bytes
from manifests.errors import InputError, RankError, UnreachableError, UserError, refused_by_system, without_thread
from runner.rundir.exit_report import code_of, rank_label

T = TypeVar("T")
_OUT_OF_MEMORY = (
    "can't allocate memory", "out of memory", "std::bad_alloc", "cannot allocate memory", "cublas_status_alloc_failed",
)  # fmt: skip
# Errors of CUDA that every attempt would meet: a kernel or cuBLAS refuses its input, or was not built for this GPU. An
# illegal memory access comes from a bug or a failing GPU: with a bug, a restart saves nothing newer, and is the last.
_BUGS_ON_GPU = (
    "device-side assert", "invalid argument", "invalid configuration", "invalid device", "no kernel image",
    "CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE", "CUBLAS_STATUS_ARCH_MISMATCH",
)  # fmt: skip
_REQUEST = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_HINT = (
    "--ac full, --loss-chunk N, a smaller --microbatch, --dp-shard N or more stages (reshard pack MANIFEST --layout "
    "pp=N) reduce memory; reshard plan MANIFEST shows what each rank needs"
)


class OneRankError(UserError):
    """An error of one rank while the others continue: the rank reports it, and its exit ends the others."""


class ReadError(OneRankError):
    """One of reading data: what other ranks do beside training continues until this one exits."""


class ExhaustedError(RankError):
    """A rank is out of memory, on its GPU or its node."""


class _BugError(UserError):
    """A bug on another rank, which prints the traceback."""

    exit_code = 1


@contextmanager
def raise_on_all_ranks(task: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank of a group; if it raises on any rank, raise on all of them.

    The block must not run collectives. The message names each failed rank once; errors that a restart cannot fix
    come first.

    Raises:
        UserError: the error of the first failing rank, with a line for each of the others.
        OneRankError: this rank's own error, if the others cannot be reached any more.
    """
    failure: UserError | None = None
    unexpected: BaseException | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except Exception as error:
        failure = exhausted(error) or unreachable(error)
        if failure is None:  # the other ranks must end too, this one prints its traceback
            unexpected = error
            failure = unforeseen(error, task, f"{type(error).__name__}: {error}")
    rank, failures = dist.get_rank(), None
    try:
        failures = from_all_ranks((rank_label(rank), failure), group)
    except Exception:  # another rank has ended, but this one knows an error
        if failure is None:
            raise
    if unexpected is not None:
        raise unexpected
    if failures is None:
        assert failure is not None
        with errors_of_rank(rank):
            raise failure
    failed = {place: error for place, error in failures if error is not None}
    if failed:
        joined = join_failures(failed)
        joined.is_elsewhere = failure is None or failure.is_elsewhere
        raise joined


def join_failures(failed: Mapping[str, UserError]) -> UserError:
    """Join the errors of ranks, by their labels, into one; an error that a restart cannot fix comes first."""
    (place, first), *others = sorted(failed.items(), key=lambda item: code_of(item[1]) == RankError.exit_code)
    joined = first.on_rank(place)
    # An error that a group of ranks has already joined is the same on all of them.
    rest = [error.on_rank(place) for place, error in others if str(error) != str(first)]
    return joined.changed(problem="\n".join((joined.problem, *(str(error.changed(hint="")) for error in rest))))


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of a group; each of them calls this. A process without a group is the only rank."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def to_first_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of a group on its first one, and nothing on the others; each of them calls this."""
    values = [value] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank; every rank calls this."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def check_same_option(flag: str, value: object) -> None:
    """Check that what a rank has read of the file that a flag names is what rank 0 has; every rank calls this."""
    expected = from_rank_0(value)
    with raise_on_all_ranks("options"):
        if value != expected:
            problem = "does not have the content that it has on rank 0"
            hint = "every node must see the same files: a copy on the node's own disk may be outdated"
            raise InputError(flag, problem, hint, code="options.differs-between-ranks")


@contextmanager
def errors_of_rank(rank: int, kind: type[OneRankError] = OneRankError) -> Iterator[None]:
    """Run a block without collectives, where `raise_on_all_ranks` would cost too much; errors name the rank."""
    try:
        yield
    except UserError as error:
        placed = error.on_rank(rank_label(rank))
        local = kind(placed.where, error.problem, error.hint, code=error.code)
        local.exit_code, local.is_elsewhere, local.is_placed = code_of(error), error.is_elsewhere, True
        raise local from error


def reading_on_rank(rank: int, items: Iterable[T]) -> Iterator[T]:
    """Yield what a rank reads; errors of reading it name the rank."""
    with errors_of_rank(rank, ReadError):
        yield from items


def exhausted(error: BaseException) -> ExhaustedError | None:
    """Return the error to report if this one, or one that caused it, means out of memory; otherwise None."""
    for cause in causes(error):
        if _is_out_of_memory(cause):
            match = _REQUEST.search(str(cause))
            wanted = f"failed to allocate {_show_request(match)}" if match else "an allocation failed"
            problem = f"out of memory: {wanted}; {_show_usage(cause)}"
            return ExhaustedError("", problem, _HINT, code="system.out-of-memory")
    return None


def unreachable(error: BaseException) -> InputError | None:
    """Return the error to report if this one means a failed disk, mount or network, or no more threads; or None."""
    if isinstance(error, OSError) and error.errno is not None:
        refusal = refused_by_system(str(error.filename or ""), error, "cannot be read or written", code="system.io")
        return refusal if isinstance(refusal, UnreachableError) else None
    return without_thread(error)


def unforeseen(error: BaseException, where: str, problem: str) -> UserError:
    """Return the error to report for one that none of the above explains: its GPU has failed, or it is a bug."""
    if any(map(_is_of_gpu, causes(error))):
        hint = "another attempt, or another GPU, may succeed; check dmesg on that node for Xid errors"
        return RankError(where, problem, hint, code="rank.gpu-failed")
    return _BugError(where, problem, code="rank.internal-error")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from: torch wraps the errors of stages."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):  # includes torch.OutOfMemoryError
        return any(words in str(error).lower() for words in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _is_of_gpu(error: BaseException) -> bool:
    reason = str(error).partition("\n")[0]  # the lines below mention device-side assertions in any case
    is_of_library = isinstance(error, RuntimeError) and reason.startswith("CUDA error: ")  # such as cuBLAS
    is_of_cuda = is_of_library or isinstance(error, torch.AcceleratorError)
    return is_of_cuda and not any(words in reason for words in _BUGS_ON_GPU)


def _show_request(request: re.Match[str]) -> str:
    number, unit = request.groups()
    return f"{int(number) / 2**20:.1f} MiB" if unit == "bytes" else f"{number} {unit}"


def _show_usage(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = torch.cuda.memory_allocated()
        return f"this rank uses {show_bytes(used)}, {show_bytes(free)} of {show_bytes(total)} are free"
    return f"peak memory of its process: {show_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)}"
