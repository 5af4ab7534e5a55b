"""Reads a pickle as data: no name in it is looked up, so none of its code runs.

Before anything is built, the opcodes are scanned: only those that build plain values are allowed, their number is
bounded, and so is the memo, whose size a pickle could set to anything.

Source: CPython 3.11, Modules/_pickle.c and pickletools.py.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any, Self

__all__ = ["BadPickleError", "Record", "Reference", "read_pickle"]

_MAX_OBJECTS = 16_000_000  # opcodes; the objects of the worst ones take about 1 GB
_FIXED = {
    "PROTO", "FRAME", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "SETITEM",
    "SETITEMS", "APPEND", "APPENDS", "ADDITEMS", "FROZENSET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET",
    "LONG_BINGET", "BINPERSID", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "POP", "POP_MARK",
}  # fmt: skip
_COUNTED = {
    "LONG1": 1,
    "SHORT_BINUNICODE": 1,
    "SHORT_BINBYTES": 1,
    "BINUNICODE": 4,
    "BINBYTES": 4,
}  # bytes of the count
_ARGUMENT_NBYTES = {"PROTO": 1, "FRAME": 8, "BININT": 4, "BININT1": 1, "BININT2": 2, "BINFLOAT": 8, "BINPUT": 1,
                    "LONG_BINPUT": 4, "BINGET": 1, "LONG_BINGET": 4}  # fmt: skip
_REFUSED, _GLOBAL = -10, -9


def _kinds() -> list[int]:
    """Return what follows each opcode: a number of bytes; minus the width of a count; or one of the constants."""
    kinds = [_REFUSED] * 256
    for opcode in pickletools.opcodes:
        code = ord(opcode.code)
        if opcode.name in _FIXED:
            kinds[code] = _ARGUMENT_NBYTES.get(opcode.name, 0)
        elif opcode.name in _COUNTED:
            kinds[code] = -_COUNTED[opcode.name]
        elif opcode.name == "GLOBAL":
            kinds[code] = _GLOBAL
    return kinds


_KINDS = _kinds()
_STOP, _LONG_BINPUT = pickle.STOP[0], pickle.LONG_BINPUT[0]


class BadPickleError(ValueError):
    """Not a pickle of plain values, or one that names something that is not on the list."""


class Record:
    """An object of any class, as the fields that the pickle says it has."""

    fields: dict[str, Any]

    def __new__(cls, *args: object) -> Self:
        made = super().__new__(cls)  # a pickle makes some objects without `__init__`
        made.fields = {}
        return made

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        self.fields = state if isinstance(state, dict) else {"state": state}

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise BadPickleError(f"an object without {name!r}")
        return self.fields[name]


class Reference:
    """A persistent ID: a reference to something outside of the pickle, as the tuple that the pickle has."""

    __slots__ = ("key",)

    def __init__(self, key: object) -> None:
        self.key = key


def read_pickle(data: bytes, known: Mapping[str, object], unknown: type[Record] | None = None) -> Any:
    """Return the value of a pickle. `known` maps `module.name` to a value; other names become records, or are refused.

    Raises:
        BadPickleError: malformed, too large, or with a name that is neither known nor made a record.
    """
    _check_opcodes(data)
    try:
        return _Reader(data, known, unknown).load()
    except BadPickleError:
        raise
    except Exception as error:  # an unpickler raises whatever it meets
        raise BadPickleError(f"malformed pickle: {type(error).__name__}: {error}"[:200]) from error


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[str, object], unknown: type[Record] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._known, self._unknown = known, unknown

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if self._unknown is None:
            raise BadPickleError(f"names {full[:120]!r}, which is not on the list of what is read")
        return self._unknown

    def persistent_load(self, pid: Any) -> Reference:
        return Reference(pid)


def _check_opcodes(data: bytes) -> None:
    at, end, num_objects = 0, len(data), 0
    while at < end:
        opcode = data[at]
        kind = _KINDS[opcode]
        at += 1
        num_objects += 1
        if kind >= 0:
            if opcode == _LONG_BINPUT and int.from_bytes(data[at : at + 4], "little") > num_objects:
                raise BadPickleError(f"malformed pickle: a memo index at byte {at} is beyond the objects before it")
            if opcode == _STOP:
                break
            at += kind
        elif kind == _GLOBAL:
            for _ in range(2):
                at = data.find(b"\n", at) + 1
                if not at:
                    raise BadPickleError("truncated pickle")
        elif kind == _REFUSED:
            raise BadPickleError(f"opcode {opcode:#04x} at byte {at - 1}, which no pickle of tensors has")
        else:
            at -= kind
            at += int.from_bytes(data[at + kind : at], "little")
        if num_objects > _MAX_OBJECTS:
            raise BadPickleError(f"more than {_MAX_OBJECTS} objects")
    if at != end or not data or data[-1] != _STOP:
        raise BadPickleError("truncated pickle, or one with bytes after its end")
