"""Errors of layouts, which point at a character of the spec, and their wording."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from itertools import islice

from manifests.errors import LayoutError, UsageError

WHERE = "layout"
_MOST_NAMED = 5  # names in a sentence
WIDTH = 72  # characters of the spec shown around the caret


class SpecError(LayoutError):
    """An invalid layout on the command line, hence exit code 2; one in a file is bad input (3)."""

    exit_code = UsageError.exit_code


def error_at(spec: str, position: int, problem: str, hint: str = "", *, code: str) -> LayoutError:
    """Return an error that shows the spec with a caret under `position`."""
    start = max(0, min(position - WIDTH // 2, len(spec) - WIDTH))
    head, tail = "…" if start else "", "…" if len(spec) > start + WIDTH else ""
    shown = head + in_one_line(spec[start : start + WIDTH]) + tail
    shown = f"{problem}\n  {shown}\n  {' ' * (len(head) + position - start)}^"
    return SpecError(WHERE, shown, hint, code=code)


def shorten(spec: str) -> str:
    """Shorten a spec to fit into a sentence."""
    return in_one_line(spec if len(spec) <= WIDTH else spec[: WIDTH - 1] + "…")


def nearest_word(word: str, known: Iterable[str]) -> str:
    """Return the most similar known word, or nothing if none is similar."""
    found = difflib.get_close_matches(word[:WIDTH], list(known), n=1)
    return found[0] if found else ""


def list_words(words: Iterable[object], conjunction: str = "or") -> str:
    """Join words as in a sentence: `8, 16 or 32`."""
    *head, last = map(str, words)
    return f"{', '.join(head)} {conjunction} {last}" if head else last


def counted(number: int, noun: str) -> str:
    """Return `1 stage`, `2 stages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def count_of(names: Collection[str], noun: str) -> str:
    return counted(len(names), noun)


def some(names: Collection[str]) -> str:
    """Return the first few of many names, for a sentence."""
    return ", ".join(islice(names, _MOST_NAMED)) + (", ..." if len(names) > _MOST_NAMED else "")


def in_one_line(text: str) -> str:
    """Replace white space by a space and unprintable characters by ?, one for one."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)
