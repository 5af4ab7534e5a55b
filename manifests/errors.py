"""Errors that a user can mend: each says where, what is wrong and what to do."""

from __future__ import annotations

import errno
import json

__all__ = [
    "InputError",
    "RankError",
    "UnreachableError",
    "UsageError",
    "UserError",
    "error_json",
    "printable",
    "refused_by_system",
]

# What a disk, a mount or a network says of itself, not of the file that was asked for.
_OF_THE_MACHINE = (
    errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENOTCONN,
    errno.ECONNRESET, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ESHUTDOWN,
    errno.EINTR, errno.EKEYEXPIRED,  # of a mount: what it was asked was broken off, its Kerberos ticket ran out
)  # fmt: skip
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # the machine has no more to give, now

_ESCAPED_LINE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_ESCAPED = {code: shown for code, shown in _ESCAPED_LINE.items() if code != ord("\n")}


def printable(text: str, *, lines: bool = True) -> str:
    """Give text that a terminal prints and does not obey: names come from files, and files from anywhere."""
    return text.translate(_ESCAPED if lines else _ESCAPED_LINE)


class UserError(Exception):
    """Something the user can mend. Anything else that escapes is our bug and keeps its traceback.

    `where` names a file, a flag or a path into a document (`stages[2].shards[0].digest`).
    """

    exit_code = 3
    is_elsewhere = False  # on a rank that ends because another one met this

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        self.where, self.problem, self.hint = where, problem, hint
        super().__init__(where, problem, hint)

    def __str__(self) -> str:
        problem = printable(self.problem)
        head = f"{printable(self.where, lines=False)}: {problem}" if self.where else problem
        return f"{head}\nhint: {printable(self.hint)}" if self.hint else head

    def within(self, prefix: str) -> UserError:
        """Give back the same error, seen from one level further out."""
        where = f"{prefix}: {self.where}" if self.where else prefix
        return type(self)(where, self.problem, self.hint)


class UsageError(UserError):
    """A flag, or a combination of flags, that makes no sense."""

    exit_code = 2


class InputError(UserError):
    """A source, layout, manifest or shard that is not what it must be."""

    exit_code = 3


class UnreachableError(InputError):
    """What a disk, a mount or a network does not give or take now. It may do so elsewhere or later."""


class RankError(UserError):
    """A rank that failed while the job was running."""

    exit_code = 5


def refused_by_system(where: str, error: OSError, problem: str = "cannot be read", hint: str = "") -> InputError:
    """Say what the system does not do with a file, and whether the machine is at fault or, with `hint`, the file."""
    said = f"{problem}: {error.strerror}"
    if error.errno in _RUN_OUT:
        return UnreachableError(where, said, "this machine has no more to give now; ulimit -n and free may tell")
    if error.errno not in _OF_THE_MACHINE:
        return InputError(where, said, hint)
    return UnreachableError(where, said, "this machine's disk, its mount or the network is at fault; dmesg may tell")


def error_json(error: UserError) -> str:
    """Give the one object that `--json` prints for a failure."""
    body = {"where": error.where, "problem": error.problem, "hint": error.hint}
    return json.dumps({"version": 1, "error": body})
