"""Writes a pickle of plain values, and of objects of classes that are named and not imported.

Source: CPython 3.11, Lib/pickletools.py; protocol 2, which torch.save writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from struct import pack

_BATCH = 1000  # of items that an unpickler has on its stack at a time


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant of a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a callable returns for these arguments."""

    function: Name
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object made without `__init__`, and its state: its attributes, or what `__setstate__` gets."""

    kind: Name
    state: object = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to something outside of the pickle."""

    key: object


def pickled(value: object) -> bytes:
    """Return a pickle of numbers, strings, tuples, lists and dicts, and of the classes above."""
    return b"".join((b"\x80\x02", *_opcodes(value), b"."))


def _opcodes(value: object) -> Iterator[bytes]:
    match value:
        case None:
            yield b"N"
        case bool():
            yield b"\x88" if value else b"\x89"
        case int():
            yield b"J" + pack("<i", value) if -(1 << 31) <= value < 1 << 31 else _long(value)
        case float():
            yield b"G" + pack(">d", value)
        case str():
            text = value.encode()
            yield b"X" + pack("<I", len(text)) + text
        case tuple():
            yield b"("
            for item in value:
                yield from _opcodes(item)
            yield b"t"
        case list():
            yield from _items(b"]", b"e", ((item,) for item in value))
        case Mapping():
            yield from _items(b"}", b"u", iter(value.items()))
        case Name(module, name):
            yield f"c{module}\n{name}\n".encode()
        case Call(function, arguments):
            yield from _opcodes(function)
            yield from _opcodes(arguments)
            yield b"R"
        case Instance(kind, state):
            yield from _opcodes(kind)
            yield b")\x81"
            if state is not None:
                yield from _opcodes(state)
                yield b"b"
        case Persistent(key):
            yield from _opcodes(key)
            yield b"Q"
        case _:
            raise AssertionError(f"no opcodes for a {type(value).__name__}")


def _long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


def _items(empty: bytes, add: bytes, items: Iterator[tuple[object, ...]]) -> Iterator[bytes]:
    yield empty
    while batch := tuple(islice(items, _BATCH)):
        yield b"("
        for part in chain.from_iterable(batch):
            yield from _opcodes(part)
        yield add
