"""What people read uses the words of the field: `words.toml` lists words that are not used, and better ones."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("manifests", "stores", "reshard", "runner", "examples", "demo", "bench", "tools")
PAGES = ("*.md", "docs/*.md", "docs/adr/*.md", "docs/errors/*.toml", "manifests/SPEC.md", "demo/*.sh", "Makefile")
GENERATED = {"docs/errors.md", "docs/architecture.md"}  # their sources are searched instead


@dataclass(frozen=True, kw_only=True)
class Word:
    """A word not to use: where it is fine all the same (`unless`, and in the files `apart`), and what to say."""

    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None
    apart: tuple[str, ...]
    say: str

    def found(self, text: str) -> Iterator[re.Match[str]]:
        fine = [match.span() for match in self.unless.finditer(text)] if self.unless else []
        for match in self.pattern.finditer(text):
            if not any(start <= match.start() and match.end() <= end for start, end in fine):
                yield match


WORDS = tuple(
    Word(
        pattern=re.compile(entry["not"], re.IGNORECASE),
        unless=re.compile(entry["unless"], re.IGNORECASE) if "unless" in entry else None,
        apart=tuple(entry.get("apart", ())),
        say=entry["say"],
    )
    for entry in tomllib.loads((ROOT / "tests/fast/words.toml").read_text())["word"]
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what people read in a file, each text with its line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from strings(ast.parse(source))
        yield from comments(source)
    else:
        start = 1
        for paragraph in re.split(r"(\n(?:[ \t]*\n)+)", source):
            yield start, paragraph
            start += paragraph.count("\n")


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield docstrings and string literals of several words; what an f-string fills in is one character."""
    nodes = list(ast.walk(tree))
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield node.lineno, node.value if " " in node.value.strip() else ""


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments, those of lines below each other as one text."""
    for match in re.finditer(r"(?m)^(?:[ \t]*#.*\n?)+|  #.*$", source):
        yield source.count("\n", 0, match.start()) + 1, re.sub(r"(?m)^\s*#[# ]*", "", match[0])


def flat(text: str) -> str:
    """Return a text with every run of white space as one blank, and without what is marked as code."""
    return re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`", text)).strip()


def paths() -> list[str]:
    code = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern)]
    return sorted({str(path.relative_to(ROOT)) for path in (*code, *pages)} - GENERATED)


def test_what_people_read_uses_the_words_of_the_field() -> None:
    found = []
    for path in paths():
        # One search of a whole file by each word: a line break, which no text has within, keeps texts apart.
        parts = list(texts(ROOT / path))
        said = "\n".join(flat(text) for _, text in parts)
        for word in WORDS:
            if not any(fnmatch(path, pattern) for pattern in word.apart):
                for match in word.found(said):
                    line = parts[said.count("\n", 0, match.start())][0]
                    excerpt = said[max(0, match.start() - 30) : match.end() + 30]
                    found.append(f"{path}:{line}: {excerpt!r}: say {word.say}")
    assert found == []


@pytest.mark.parametrize("place", ["docs/*.md", "runner/**/*.py"])
@pytest.mark.parametrize("term", ["activation checkpointing", "gradient accumulation"])
def test_standard_terms_are_said_where_people_search(term: str, place: str) -> None:
    assert any(term in flat(path.read_text(encoding="utf-8")).lower() for path in ROOT.glob(place))


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("the run goes on with step 3", 1),
        ("what goes on a stage", 0),
        ("both moments, and\nexp_avg", 0),
        ("moments of AdamW", 1),
        ("recommended amendments", 0),
        ("copied to pinned memory", 0),
        ("a pin of the file", 1),
        ("a folder that `holds` is", 0),
        ("is no checkpoint, though there is no manifest", 1),
        ("Give the sum", 1),
        ("hint: give the sum", 0),
        ("whatever threshold", 0),
        ("the step is carried", 1),
        ("the plan is carried out", 0),
        ("what the rank held, and held-out text", 1),
        ("it starts afresh", 1),
        ("RNG state is seeded again", 1),
        ("is left out, and said so", 1),
    ],
)
def test_words_are_found_but_not_within_others(text: str, num_found: int) -> None:
    assert sum(1 for word in WORDS for _ in word.found(flat(text))) == num_found
