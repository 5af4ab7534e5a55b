"""Errors that a user can fix: each says where, what was expected, what was found and what to do.

# Note [Parameters in errors]
An error names a parameter of the Python API as `Parameter`, which is written as Python does. A command writes flags
instead: it says so once, for its process, with `naming_flags`.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Self, SupportsIndex

# Errors of a disk, a mount or a network rather than of the file.
_OF_THE_MACHINE = (
    errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENOTCONN,
    errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ESHUTDOWN,
    errno.EINTR, errno.EKEYEXPIRED,  # of a mount: the call was interrupted, its Kerberos ticket expired
)  # fmt: skip
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # a system resource limit is reached
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # of the disk, or of a quota on it

_ESCAPED_LINE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_ESCAPED = {code: shown for code, shown in _ESCAPED_LINE.items() if code != ord("\n")}


def printable(text: str, *, lines: bool = True) -> str:
    """Return text without control characters: names come from files, and files from anywhere."""
    return text.translate(_ESCAPED if lines else _ESCAPED_LINE)


def flag_like(parameter: str) -> str:
    """Return the flag that is called like a parameter: `--dtype` for `conversion.dtype`."""
    return f"--{parameter.rpartition('.')[2].replace('_', '-')}"


_flag_of: Callable[[str], str] | None = None  # None: in Python


@contextmanager
def naming_flags(flag_of: Callable[[str], str] = flag_like) -> Iterator[None]:
    """Write the parameters in errors as flags; see Note [Parameters in errors]."""
    global _flag_of
    before, _flag_of = _flag_of, flag_of
    try:
        yield
    finally:
        _flag_of = before


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the Python API in an error, perhaps with a value: `--force` or `force=True` in a sentence.

    A field of an object that is a parameter is `conversion.dtype`.
    """

    name: str
    value: object = None

    def __str__(self) -> str:
        """Return it as a sentence has it."""
        return self.where if _flag_of else f"`{self.where}`"

    @property
    def where(self) -> str:
        """The parameter as the place of an error."""
        if _flag_of is None:
            return self.name if self.value is None else f"{self.name}={self.value!r}"
        flag, values = _flag_of(self.name), self.value if isinstance(self.value, list) else [self.value]
        return flag if self.value is None or self.value is True else " ".join((flag, *map(str, values)))


class UserError(Exception):
    """Something the user can fix. Anything else that escapes is our bug and keeps its traceback.

    `code` is a stable name for the kind of error (`source.missing-tensor`), which docs/errors.md explains; `where`
    names a file, a parameter or a path into a document (`stages[2].shards[0].digest`).
    """

    exit_code = 3
    is_elsewhere = False  # raised on a rank because another one failed with it
    is_placed = False  # whether `where` names the rank that failed

    def __init__(self, where: str | Parameter, problem: str, hint: str = "", *, code: str) -> None:
        self.where = where.where if isinstance(where, Parameter) else where
        self.problem, self.hint, self.code = problem, hint, code
        super().__init__(self.where, problem, hint)

    def __str__(self) -> str:
        """Return the message, with the code at the end of its first line."""
        first, line_end, more = printable(self.problem).partition("\n")
        head = f"{printable(self.where, lines=False)}: {first}" if self.where else first
        problem = f"{head} [{self.code}]{line_end}{more}" if self.code else f"{head}{line_end}{more}"
        return f"{problem}\nhint: {printable(self.hint)}" if self.hint else problem

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the code, which is keyword-only: errors are sent between ranks."""
        return partial(type(self), code=self.code), self.args, vars(self)

    def within(self, prefix: str) -> Self:
        """Return the same error with `prefix` before `where`; class, code and every other attribute are kept."""
        return self.changed(where=f"{prefix}: {self.where}" if self.where else prefix)

    def on_rank(self, rank: str) -> Self:
        """Return the same error with the rank that failed before `where`, unless it is there already."""
        if self.is_placed:
            return self
        error = self.within(rank)
        error.is_placed = True
        return error

    def changed(self, *, where: str | None = None, problem: str | None = None, hint: str | None = None) -> Self:
        """Return the error with another wording. Class, code and other attributes are kept, the traceback is not."""
        from copy import copy

        error = copy(self)
        error.where = self.where if where is None else where
        error.problem = self.problem if problem is None else problem
        error.hint = self.hint if hint is None else hint
        return error


class UsageError(UserError):
    """A parameter or flag, or a combination of them, that is not valid."""

    exit_code = 2


class InputError(UserError):
    """Something on disk, in a store or in a config that is not valid. The base of the classes by area."""

    exit_code = 3


class SourceError(InputError):
    """`source.*`: the checkpoint to read is incomplete, inconsistent, unsupported, or changed while it was read."""


class ModelError(InputError):
    """`config.*`, `model.*`: a config that is invalid or unsupported, or weights of another model."""


class LayoutError(InputError):
    """`layout.*`: a layout that is not valid, or does not fit the model."""


class ScheduleError(InputError):
    """`schedule.*`: a pipeline schedule that is not valid, deadlocks, or does not fit the layout."""


class ManifestError(InputError):
    """`manifest.*`: a manifest, or a record beside it, that is damaged, edited or inconsistent."""


class ShardError(InputError):
    """`shard.*`, `header.*`: a safetensors file that is damaged, or does not match the manifest."""


class SignatureError(InputError):
    """`signature.*`: a manifest whose signature is missing, damaged, of another key or of another manifest."""

    exit_code = 4


class OutputError(InputError):
    """`output.*`: an output that cannot be written, or must not be replaced."""


class StoreError(InputError):
    """`store.*`: a file system, hub or bucket that refuses a request, or an address that does not exist there."""


class DataError(InputError):
    """`data.*`, `tokenizer.*`: training data or a tokenizer that cannot be used."""


class CheckpointError(InputError):
    """`checkpoint.*`, `resume.*`: a training checkpoint that cannot be written, or resumed from."""


class LogError(InputError):
    """`log.*`: a log or trace of a run that is damaged or of another format."""


class LaunchError(InputError):
    """`launch.*`: a job that cannot be started here, or a record of one that cannot be used."""


class UnreachableError(InputError):
    """Any area: a disk, mount or network that fails, or a file that changes while it is read. It may succeed later."""


class RankError(UserError):
    """A rank that failed while the job was running."""

    exit_code = 5


_OF_AREAS: dict[str, type[InputError]] = {"checkpoint": CheckpointError, "data": DataError, "log": LogError}
_OF_AREAS |= {"output": OutputError, "schedule": ScheduleError, "store": StoreError}


def refused_by_system(
    where: str | Parameter, error: OSError, problem: str = "cannot be read", hint: str = "", *, code: str
) -> InputError:
    """Return an error about a file that the system refuses; `hint` is used unless the machine itself is at fault.

    A full disk has a code of its own, whatever was written to it.
    """
    sentence = f"{problem}: {error.strerror}"
    if error.errno == errno.EROFS and not hint:
        hint = "choose a folder on a disk that is mounted read-write"
    if error.errno in DISK_FULL:
        code, hint = "output.disk-full", hint or "free space on this disk, or choose another one"
    if error.errno in _RUN_OUT:
        hint = "system resource limit reached; check ulimit -n and free memory"
        return UnreachableError(where, sentence, hint, code=code)
    if error.errno not in _OF_THE_MACHINE:
        return _OF_AREAS.get(code.partition(".")[0], InputError)(where, sentence, hint, code=code)
    hint = "a disk, mount or network failure of this machine; check dmesg"
    return UnreachableError(where, sentence, hint, code=code)


@contextmanager
def system_errors(
    where: object, problem: str = "cannot be read", hint: str = "", *, code: str, names_file: bool = False
) -> Iterator[None]:
    """Raise `refused_by_system` where the system refuses what a block does: of `where`.

    With `names_file` it is of the file that the system names, if it names one.
    """
    try:
        yield
    except OSError as error:
        place = error.filename if names_file and error.filename else where
        raise refused_by_system(str(place), error, problem, hint, code=code) from error


def without_thread(error: BaseException) -> UnreachableError | None:
    """Return the error to report if this one means that no thread can be started; otherwise None."""
    if not isinstance(error, RuntimeError) or "can't start new thread" not in str(error):
        return None
    problem, hint = "no thread can be started", "system resource limit reached; check ulimit -u and free memory"
    return UnreachableError("", problem, hint, code="system.refused")


def error_json(error: UserError) -> str:
    """Return the JSON object that `--json` prints for a failure."""
    import json  # not above: every command imports this module, and few print an error

    body = {"code": error.code, "where": error.where, "problem": error.problem, "hint": error.hint}
    return json.dumps({"version": 1, "error": body})


def check_choice(parameter: Parameter, value: object, allowed: Collection[str]) -> None:
    """Raise UsageError unless the value is one of those that are allowed."""
    if value not in allowed:
        problem = f"expected one of {', '.join(allowed)}, found {str(value)[:80]!r}"
        raise UsageError(parameter, problem, code="options.invalid-value")


def as_int(value: object) -> object:
    """Return an integer of any type, such as NumPy's, as an int, and anything else as it is, True included."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # of an array
            return operator.index(value)
    return value


def as_texts(value: str | PathLike[str] | Iterable[str | PathLike[str]]) -> tuple[str, ...]:
    """Return names or paths as text; a single one may be outside a list."""
    return (str(value),) if isinstance(value, str | PathLike) else tuple(map(str, value))


def check_count(parameter: Parameter, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return an integer of any type as an int; raise UsageError unless it is one from `least` to `most`."""
    count = as_int(value)
    if type(count) is not int or count < least or (most is not None and count > most):
        problem = f"expected a number from {least} {'up' if most is None else f'to {most}'}, found {repr(value)[:80]}"
        raise UsageError(parameter, problem, code="options.invalid-value")
    return count
