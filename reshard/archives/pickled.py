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

from reshard.archives.opcodes import is_plain

__all__ = ["BadPickleError", "Record", "Reference", "read_pickle"]

_MAX_OBJECTS = 16_000_000  # opcodes; the objects of the worst ones take about 1 GB
_MAX_DEPTH = 64  # of tuples in tuples: CPython hashes them recursively, without a limit of its own
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}


def _by_code(**names: str) -> list[str]:
    """Return for each opcode the key whose words name it, or ""."""
    found = [""] * 256
    for key, listed in names.items():
        for name in listed.split():
            found[_CODES[name]] = key
    return found


_EFFECTS = _by_code(
    push="NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT EMPTY_DICT EMPTY_LIST EMPTY_SET EMPTY_TUPLE",
    text="LONG1 SHORT_BINUNICODE SHORT_BINBYTES BINUNICODE BINBYTES",
    put="BINPUT LONG_BINPUT MEMOIZE",
    get="BINGET LONG_BINGET",
    tuple="TUPLE1 TUPLE2 TUPLE3",
    mark="MARK",
    marked_tuple="TUPLE FROZENSET",
    marked_items="SETITEMS APPENDS ADDITEMS",
    items="SETITEM APPEND BUILD",
    call="REDUCE NEWOBJ",
    name="STACK_GLOBAL",
    named="GLOBAL",
    reference="BINPERSID",
    none="PROTO FRAME",
    stop="STOP",
)
_WIDTHS = {
    "PROTO": 1, "FRAME": 8, "BININT": 4, "BININT1": 1, "BININT2": 2, "BINFLOAT": 8, "BINPUT": 1, "LONG_BINPUT": 4,
    "BINGET": 1, "LONG_BINGET": 4,
    "LONG1": 1, "SHORT_BINUNICODE": 1, "SHORT_BINBYTES": 1, "BINUNICODE": 4, "BINBYTES": 4,
}  # fmt: skip
_ARGUMENT_NBYTES = [0] * 256  # of texts, those of their length
for _name, _width in _WIDTHS.items():
    _ARGUMENT_NBYTES[_CODES[_name]] = _width
_NUM_TAKEN = {_CODES["TUPLE1"]: 1, _CODES["TUPLE2"]: 2, _CODES["TUPLE3"]: 3}
_NUM_ITEMS = {_CODES["SETITEM"]: 2, _CODES["APPEND"]: 1, _CODES["BUILD"]: 1}
_MEMOIZE = _CODES["MEMOIZE"]


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
    if not is_plain(data, _MAX_OBJECTS):
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
    """Raise unless the pickle has only known opcodes, few enough, and nests tuples little.

    The stack and the memo are followed, with only the depth of tuples in tuples of each value.
    """
    at, num_left = 0, _MAX_OBJECTS
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    try:
        while (effect := _EFFECTS[opcode := data[at]]) != "stop":
            begin = at + 1
            at = begin + _ARGUMENT_NBYTES[opcode]
            num_left -= 1
            if effect == "push":
                stack.append(0)
            elif effect == "put":
                index = len(memo) if opcode == _MEMOIZE else int.from_bytes(data[begin:at], "little")
                if index > len(memo) + 1:  # 1: older pickles count from 1
                    raise BadPickleError("malformed pickle: a memo with holes")
                memo[index] = stack[-1]
            elif effect == "get":
                stack.append(memo[int.from_bytes(data[begin:at], "little")])
            elif effect == "text":
                at += int.from_bytes(data[begin:at], "little")
                stack.append(0)
            elif effect == "mark":
                marks.append(len(stack))
            elif effect == "tuple":
                _nest(stack, len(stack) - _NUM_TAKEN[opcode])
            elif effect == "marked_tuple":
                _nest(stack, marks.pop())
            elif effect == "marked_items":
                del stack[marks.pop() :]
            elif effect == "items":
                del stack[-_NUM_ITEMS[opcode] :]
            elif effect == "call":
                stack[-2:] = [stack[-1]]  # what is made of a tuple may be that tuple
            elif effect == "name":
                stack[-2:] = [0]
            elif effect == "named":
                at = data.index(b"\n", data.index(b"\n", begin) + 1) + 1
                stack.append(0)
            elif effect == "reference":
                stack[-1] = 0
            elif effect != "none":
                raise BadPickleError(f"opcode {opcode:#04x} at byte {begin - 1}, which no pickle of tensors has")
            if not num_left:
                raise BadPickleError(f"more than {_MAX_OBJECTS} objects")
    except LookupError as error:
        raise BadPickleError("truncated or malformed pickle") from error
    except ValueError as error:
        raise error if isinstance(error, BadPickleError) else BadPickleError("truncated pickle") from error
    if at + 1 != len(data):
        raise BadPickleError("a pickle with bytes after its end")


def _nest(stack: list[int], begin: int) -> None:
    """Replace the values from `begin` on by a tuple of them."""
    if begin < 0:
        raise LookupError
    depth = 1 + max(stack[begin:], default=-1)
    if depth > _MAX_DEPTH:
        raise BadPickleError(f"tuples nested more than {_MAX_DEPTH} deep")
    stack[begin:] = [depth]
