"""Options declared once: a dataclass field states its flag, default and help, and click's parameters derive from it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from manifests.command.neighbors import DTYPES
from manifests.errors import UsageError
from stores.address import check_local, is_url

T = TypeVar("T")
_SAME: Any = object()
MOST = (1 << 31) - 1  # of whole numbers: no memory, table or clock needs more


class Number(click.FloatRange):
    """A number, neither infinite nor NaN, which no bounds exclude."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            where = param.opts[0] if param is not None else ""
            raise UsageError(where, f"expected a finite number, found {number}", code="options.invalid-value")
        return number


class WholeNumber(click.IntRange):
    """An integer from `min` to `MOST`. Help shows the lower bound alone."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(super().convert(value, param, ctx))
        if number > MOST:
            self.fail(f"expected at most {MOST}, found {str(value)[:40]}", param, ctx)
        return number


class DtypeName(click.Choice[str]):
    """A choice of dtypes, which may be called as torch does: `bfloat16` is `bf16`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(DTYPES.get(value, value), param, ctx)


class LocalPath(click.Path):
    """A path of this machine; an address would become a folder of that name."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        check_local(param.opts[0] if param is not None else "", value)
        return super().convert(value, param, ctx)


class LocalManifest(click.Path):
    """A manifest, or its folder, on this machine; as a path, an address would lose a slash."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_url(value):
            hint = f"copy it to a folder: reshard pack {shlex.quote(value)} --out DIR"
            raise UsageError(value, "is not on this machine", hint, code="options.remote-manifest")
        return super().convert(value, param, ctx)


def nearest_multiples(count: int, unit: int) -> str:
    """Return the multiples of `unit` on both sides of a number, for a hint."""
    lower = count // unit * unit
    return f"{lower} or {lower + unit}" if lower else str(unit)


@dataclass(frozen=True, slots=True)
class _Flag:
    option: click.Option
    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Group:
    of: type[Any]
    unless_none: str | None


def flag(
    *spelled: str,
    default: Any = MISSING,
    written_default: Any = _SAME,
    read: Callable[[Any], Any] = lambda value: value,
    **settings: Any,
) -> Any:
    """Declare a dataclass field that a flag sets.

    `spelled` and `settings` are click's, such as `"--lr", help=...`. `written_default` is click's default where it is
    not the field's, and `read` turns click's value into the field's.
    """
    if written_default is not _SAME:
        settings["default"] = written_default
    elif default is not MISSING:
        settings["default"] = default
    return field(default=default, metadata={"flag": _Flag(click.Option(spelled, **settings), read)})


def group(of: type[Any], *, default: Any = MISSING, unless_none: str | None = None) -> Any:
    """Declare a dataclass field that is itself a dataclass of flags, or None if parameter `unless_none` is None."""
    return field(default=default, metadata={"group": _Group(of, unless_none)})


def parameters_of(declared: type[Any]) -> Iterator[click.Option]:
    """Yield the click options of a dataclass and its groups, in the order of their fields."""
    for member in fields(declared):
        if "flag" in member.metadata:
            yield member.metadata["flag"].option
        elif "group" in member.metadata:
            yield from parameters_of(member.metadata["group"].of)


def build(declared: type[T], values: Mapping[str, Any], **others: Any) -> T:
    """Return the dataclass built from click's values by parameter name; `others` are fields without a flag."""
    for member in fields(declared):  # type: ignore[arg-type]
        if "flag" in member.metadata:
            declaration: _Flag = member.metadata["flag"]
            others[member.name] = declaration.read(values[str(declaration.option.name)])
        elif "group" in member.metadata:
            inner: _Group = member.metadata["group"]
            is_absent = inner.unless_none is not None and values[inner.unless_none] is None
            others[member.name] = None if is_absent else build(inner.of, values)
    return declared(**others)
