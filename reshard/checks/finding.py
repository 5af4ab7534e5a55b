"""A problem of a checkpoint: reported, not raised, so that one run names all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from manifests.errors import UserError
from reshard.tensors.checkpoint import TensorAt

__all__ = ["Contents", "Finding", "Report", "count_of", "finding_of", "some"]

_MOST_NAMED = 5  # names in a sentence; `Finding.names` has all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong, where, and what to do about it. `code` is stable, see docs/errors.md."""

    code: str
    where: str
    problem: str
    hint: str = ""
    names: tuple[str, ...] = ()  # the tensors or files that it is about, where there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a checkpoint was found to have, as far as it could be read. Units: bytes of tensors."""

    num_tensors: int = 0
    num_files: int = 0
    nbytes: int = 0
    tensors: Mapping[str, TensorAt] = field(default_factory=dict)  # by stored name, where they can be read


Report = Callable[[Finding], object]


def finding_of(error: UserError) -> Finding:
    """Return an error that a reader raised as a finding."""
    return Finding(code=error.code, where=error.where, problem=error.problem, hint=error.hint)


def count_of(names: Collection[str], noun: str) -> str:
    """Return a number with its noun: "1 tensor", "2 tensors"."""
    return f"{len(names)} {noun}" + ("" if len(names) == 1 else "s")


def some(names: Collection[str]) -> str:
    """Return the first few of many names, for a sentence."""
    shown = list(names)[:_MOST_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
