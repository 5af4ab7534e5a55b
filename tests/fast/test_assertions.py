"""Tests assert codes and places: the wording of a message is free to improve, and is reviewed in snapshots."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("manifests", "stores", "reshard", "runner")
MOST_WORDS = 8
SHARED = 4  # words in a row that show a text to be a message of the product


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the string literals of a file but its docstrings, with what f-strings fill in as one character."""
    nodes = list(ast.walk(tree))
    docstrings = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    skipped = docstrings | within
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def words(text: str) -> list[str]:
    """Return the plain words of a text: no names of tensors, files or fields."""
    found = (word.strip(".,:;()'\"") for word in text.lower().split())
    return [word for word in found if re.fullmatch(r"[a-z][a-z'-]*", word)]


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Yield each run of `SHARED` words that nothing filled in interrupts."""
    for piece in text.split("\0"):
        found = words(piece)
        yield from (tuple(found[start : start + SHARED]) for start in range(len(found) - SHARED + 1))


@cache
def said_by_product() -> frozenset[tuple[str, ...]]:
    paths = (path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))
    return frozenset(run for path in paths for _, text in texts(ast.parse(path.read_text())) for run in runs(text))


def test_no_more_than_eight_words_of_a_message_are_asserted() -> None:
    repeated = [
        f"{path.relative_to(ROOT)}:{line}: {text[:80]!r}"
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__)
        for line, text in texts(ast.parse(path.read_text()))
        if len(text.split()) > MOST_WORDS
        and len(words(text)) > MOST_WORDS
        and not said_by_product().isdisjoint(runs(text))
    ]
    assert repeated == []
