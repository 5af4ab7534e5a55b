"""Reads a pickle as data: no name in it is looked up, so none of its code runs.

Before anything is built, the opcodes are scanned: only those that build plain values are allowed, their number is
bounded, and so are the memo, whose size a pickle could set to anything, and the time that hashing takes.

Source: CPython 3.11, Modules/_pickle.c and pickletools.py.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Self

_MAX_OBJECTS = 16_000_000  # opcodes; the objects of the worst ones take about 1 GB
_MAX_HASHED = 50_000_000  # values in tuples, wherever one may be hashed: CPython does it recursively, and each time
_REPEATS = "tuples that repeat each other"
_MAX_TUPLE_KEYS = 5_000  # of dicts and sets: numbers are hashed without a secret, and may be chosen to collide
_MANY_KEYS = f"more than {_MAX_TUPLE_KEYS} tuples or large numbers as keys"
_HOLES = "malformed pickle: a memo with holes"
_MAX_SHOWN = 10_000_000  # values in containers, as often as they are there
_index = struct.Struct("<I").unpack_from
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_EFFECTS = {
    "push": "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT EMPTY_DICT EMPTY_LIST EMPTY_SET EMPTY_TUPLE",
    "long": "LONG1",
    "text": "SHORT_BINUNICODE SHORT_BINBYTES BINUNICODE BINBYTES",
    "memoize": "MEMOIZE",
    "put": "BINPUT LONG_BINPUT",
    "get": "BINGET LONG_BINGET",
    "tuple": "TUPLE1 TUPLE2 TUPLE3",
    "mark": "MARK",
    "marked_tuple": "TUPLE",
    "marked_set": "FROZENSET",
    "marked_items": "APPENDS",
    "marked_keys": "SETITEMS ADDITEMS",
    "item": "APPEND",
    "key": "SETITEM",
    "build": "BUILD",
    "call": "REDUCE NEWOBJ",
    "name": "STACK_GLOBAL",
    "named": "GLOBAL",
    "reference": "BINPERSID",
    "none": "PROTO FRAME",
    "stop": "STOP",
}
_WIDTHS = {
    "PROTO": 1, "FRAME": 8, "BININT": 4, "BININT1": 1, "BININT2": 2, "BINFLOAT": 8, "BINPUT": 1, "LONG_BINPUT": 4,
    "BINGET": 1, "LONG_BINGET": 4,
    "LONG1": 1, "SHORT_BINUNICODE": 1, "SHORT_BINBYTES": 1, "BINUNICODE": 4, "BINBYTES": 4,
}  # fmt: skip
# By opcode: what it does, and the bytes of its argument; of texts, those of their length.
_OPCODES: list[tuple[str, int]] = [("", 0)] * 256
for _effect, _names in _EFFECTS.items():
    for _name in _names.split():
        _OPCODES[_CODES[_name]] = _effect, _WIDTHS.get(_name, 0)
_NUM_TAKEN = {_CODES["TUPLE1"]: 1, _CODES["TUPLE2"]: 2, _CODES["TUPLE3"]: 3}
_STEPS = {_CODES["SETITEMS"]: 2, _CODES["ADDITEMS"]: 1}  # from key to key


class BadPickleError(ValueError):
    """Not a pickle of plain values, or one that names something that is not on the list."""


class Record:
    """An object of any class, as the fields that the pickle says it has, and what it was called with."""

    fields: dict[str, Any]
    args: tuple[object, ...]

    def __new__(cls, *args: object) -> Self:
        made = super().__new__(cls)  # a pickle makes some objects without `__init__`
        made.fields, made.args = {}, args
        return made

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and not state[0] and isinstance(state[1], dict):
            state = state[1]  # of `__slots__`
        self.fields = state if isinstance(state, dict) else {"state": state}

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise BadPickleError(f"an object without {name!r}")
        return self.fields[name]

    def expect(self, *names: str) -> None:
        """Raise BadPickleError if it has other fields than these, or was called with anything."""
        if other := [name for name in self.fields if name not in names]:
            raise BadPickleError(f"an object with {str(other[0])[:80]!r}, which is not read")
        if self.args:
            raise BadPickleError("an object that is made of values, which are not read")


class Reference:
    """A persistent ID: a reference to something outside of the pickle, as the tuple that the pickle has."""

    __slots__ = ("key",)

    def __init__(self, key: object) -> None:
        self.key = key


def read_pickle(data: bytes, values: Mapping[str, object], unknown: type[Record] | None = None) -> Any:
    """Return the value of a pickle. `values` maps `module.name` to a value; other names become records, or are refused.

    What is called returns an object of its own or one of its arguments, and copies none: a pickle can repeat a call of
    a few bytes with a list of millions.
    """
    _check_opcodes(data)
    try:
        return _Reader(data, values, unknown).load()
    except BadPickleError:
        raise
    except Exception as error:  # an unpickler raises whatever it meets
        raise BadPickleError(f"malformed pickle: {type(error).__name__}: {error}"[:200]) from error


def check_repeats(value: object) -> None:
    """Raise BadPickleError if comparing or printing a value would take long: its containers may repeat each other."""
    try:
        _work_in(value, {})
    except RecursionError as error:
        raise BadPickleError("containers nested too deeply") from error


def _work_in(value: object, work: dict[int, int]) -> int:
    """Return the work of visiting all that is in a value; `work` caches that of containers, by their `id`."""
    if isinstance(value, Record):
        value = value.fields
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return 1
    if id(value) not in work:
        work[id(value)] = _MAX_SHOWN  # if it is met again in itself
        items = chain(value, value.values()) if isinstance(value, dict) else value
        work[id(value)] = _work_of(_work_in(item, work) for item in items)
    if work[id(value)] >= _MAX_SHOWN:
        raise BadPickleError("containers that repeat each other")
    return work[id(value)]


def _work_of(items: Iterable[int]) -> int:
    """Return the work of a container, given that of its items: an eighth is added, so that few fit in each other."""
    inner = sum(items)
    return 1 + inner + inner // 8


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, values: Mapping[str, object], unknown: type[Record] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._values, self._unknown = values, unknown

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._values:
            return self._values[full]
        if self._unknown is None:
            raise BadPickleError(f"names {full[:120]!r}, which is not on the list of what is read")
        return self._unknown

    def persistent_load(self, pid: Any) -> Reference:
        return Reference(pid)


def _check_opcodes(data: bytes) -> None:
    """Raise unless the pickle has only known opcodes, few enough, and tuples that are quickly hashed.

    The stack and the memo are followed, with only the work of hashing each value: 0 of a name, which is not to be
    changed, 1 of other values, 2 of a large number, and of a tuple more than of all that is in it.
    """
    at, hashes_left, keys_left = 0, _MAX_HASHED, _MAX_TUPLE_KEYS
    stack: list[int] = []
    marks: list[int] = []
    memo: list[int] = []
    has_hole = False
    try:
        for _ in range(_MAX_OBJECTS):
            effect, nbytes = _OPCODES[opcode := data[at]]
            begin = at + 1
            at = begin + nbytes
            if effect == "get":
                stack.append(work := memo[_index(data, begin)[0] if nbytes == 4 else data[begin]])
                if (hashes_left := hashes_left - work) < 0:
                    raise BadPickleError(_REPEATS)
            elif effect == "memoize":
                if has_hole:
                    raise BadPickleError(_HOLES)
                memo.append(stack[-1])
            elif effect == "push":
                stack.append(1)
            elif effect == "put":
                index = int.from_bytes(data[begin:at], "little")
                if index == 1 and not memo:  # older pickles count from 1
                    memo.append(0)
                    has_hole = True
                if index > len(memo):
                    raise BadPickleError(_HOLES)
                memo[index : index + 1] = (stack[-1],)
            elif effect == "text":
                at += int.from_bytes(data[begin:at], "little")
                stack.append(1)
            elif effect == "mark":
                marks.append(len(stack))
            elif effect == "tuple":
                hashes_left = _nest(stack, len(stack) - _NUM_TAKEN[opcode], hashes_left)
            elif effect == "marked_tuple":
                hashes_left = _nest(stack, marks.pop(), hashes_left)
            elif effect == "marked_items":
                del stack[marks.pop() :]
            elif effect == "marked_keys":
                mark = marks.pop()
                if max(keys := stack[mark :: _STEPS[opcode]], default=0) > 1:
                    keys_left = _keys_left(keys_left, keys)
                del stack[mark:]
            elif effect == "build":
                del stack[-1]
                if not stack[-1]:
                    raise BadPickleError("changes what it names")
            elif effect == "call":
                del stack[-2]  # what is made of a tuple may be that tuple
            elif effect == "name":
                stack[-2:] = [0]
            elif effect == "named":
                at = data.index(b"\n", data.index(b"\n", begin) + 1) + 1
                stack.append(0)
            elif effect == "reference":
                stack[-1] = 1
            elif effect == "long":
                at += data[begin]
                stack.append(2 if data[begin] > 8 else 1)
            elif effect == "marked_set":
                keys_left = _keys_left(keys_left, stack[marks[-1] :])
                hashes_left = _nest(stack, marks.pop(), hashes_left)
            elif effect == "item":
                del stack[-1]
            elif effect == "key":
                keys_left = _keys_left(keys_left, stack[-2:-1])
                del stack[-2:]
            elif effect == "stop":
                break
            elif effect != "none":
                raise BadPickleError(f"opcode {opcode:#04x} at byte {begin - 1}, which no pickle of tensors has")
        else:
            raise BadPickleError(f"more than {_MAX_OBJECTS} objects")
    except (LookupError, struct.error) as error:
        raise BadPickleError("truncated or malformed pickle") from error
    except ValueError as error:
        raise error if isinstance(error, BadPickleError) else BadPickleError("truncated pickle") from error
    if at != len(data):
        raise BadPickleError("a pickle with bytes after its end")


def _keys_left(remaining: int, keys: Sequence[int]) -> int:
    """Return how many more keys may be tuples or large numbers after these, given the work of hashing each."""
    remaining -= sum(work > 1 for work in keys)
    if remaining < 0:
        raise BadPickleError(_MANY_KEYS)
    return remaining


def _nest(stack: list[int], begin: int, hashes_left: int) -> int:
    """Replace the values from `begin` on by a tuple of them; return what is left after the work of hashing it."""
    if begin < 0:
        raise LookupError
    items = stack[begin:]
    stack[begin:] = [work := len(items) + _work_of(items)]
    if work > hashes_left:
        raise BadPickleError(_REPEATS)
    return hashes_left - work
