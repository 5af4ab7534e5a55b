"""Build the documentation site, build/site: no warning, no dead link, and nothing that a reader's browser must fetch.

`make docs`. First build/docs is written: the pages of docs/, and README.md, manifests/SPEC.md, CONTRIBUTING.md and
CHANGELOG.md as pages, too, with those on commands and the Python API, which are made of the code. A link from a page
to another file of the repository (an example, a result of a benchmark) gets a copy of that file. llms.txt lists the
pages with what each is about. Then mkdocs builds that folder (mkdocs.yml).
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools import api, commands

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "docs"
# Pages by the file that they are made of, from the root of the repository.
PAGES = {
    "README.md": "index.md",
    "manifests/SPEC.md": "format.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
GENERATED = {"commands.md": commands.render, "python-api.md": api.render}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s]+)(?=\))")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_GRAPH = re.compile(r"^```mermaid\nflowchart TD\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CARRIED = "pictures/*.*", "scripts/*.js"  # as they are
_ABOUT_WORDS = 40
_LAST = "---\nsearch:\n  boost: 0.1\n---\n\n"  # records of decisions come after the pages that say how


def main() -> int:
    """Write build/docs and build the site; return the exit code."""
    shutil.rmtree(TREE, ignore_errors=True)
    sources = {**PAGES, **{f"docs/{page}": page for page in _pages()}}
    for path, page in sources.items():
        _write(page, (_LAST if page.startswith("adr/") else "") + _moved(path, (ROOT / path).read_text()))
    for page, render in GENERATED.items():
        _write(page, _moved(f"docs/{page}", render()))
    _write("adr/index.md", decisions())
    for path in (path for pattern in _CARRIED for path in sorted((ROOT / "docs").glob(pattern))):
        _copy(path, path.relative_to(ROOT / "docs").as_posix())
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    _write("llms.txt", "\n".join(_lines_for_models(config)))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    built = subprocess.run(
        command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    if built.returncode:  # strict: a warning, too
        print(built.stdout + built.stderr, file=sys.stderr)
    return built.returncode


def decisions() -> str:
    """Return the page that lists the records in docs/adr."""
    lines = ["# Decisions", "", "Why things are as they are: one record for each decision, the oldest first.", ""]
    for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")):
        lines.append(f"- [{path.read_text().partition(chr(10))[0].removeprefix('# ')}]({path.name})")
    return "\n".join(lines) + "\n"


def _pages() -> Iterator[str]:
    folder = ROOT / "docs"
    for path in sorted((*folder.glob("*.md"), *folder.glob("adr/*.md"))):
        yield path.relative_to(folder).as_posix()


def _moved(source: str, text: str) -> str:
    """Point a page's links to where their files are on the site, and copy those files."""
    page = _page_of(source)
    assert page is not None, source

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        return posixpath.relpath(_target(place), posixpath.dirname(page) or ".") + mark + anchor

    return ROW.sub(plain_pipes, _GRAPH.sub(_plain_graph, _LINK.sub(moved, text)))


def _plain_graph(graph: re.Match[str]) -> str:
    """Return the arrows of a graph as text: GitHub draws them, and the site has no script that does."""
    ends = defaultdict[str, list[str]](list)
    for arrow in re.finditer(r"(\w+) --> (\w+)", graph[1]):
        ends[arrow[1]].append(arrow[2])
    width = max(map(len, ends))
    return "\n".join(["```text", *(f"{start:{width}} → {', '.join(to)}" for start, to in ends.items()), "```"])


def plain_pipes(row: re.Match[str]) -> str:
    """Return a table's row with `|` in its code, where GitHub needs a backslash that Python-Markdown would show."""
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def _target(place: str) -> str:
    """Return where a file or folder of the repository is on the site; other files are copied there."""
    path = ROOT / place
    if page := _page_of(place):
        return "adr/index.md" if path.is_dir() else page
    if path.is_dir():
        for inner in sorted(path.glob("*.py")):
            _copy(inner, f"files/{place}/{inner.name}")
        return f"files/{place}/{min(path.glob('*.py')).name}"
    if path.is_file():  # mkdocs reports the others
        _copy(path, f"files/{place}")
    return f"files/{place}"


def _page_of(place: str) -> str | None:
    """Return where a file is on the site if it is below docs/ or one of `PAGES`."""
    return PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)


def _lines_for_models(config: dict[str, object]) -> Iterator[str]:
    """Yield the lines of llms.txt: each page's title, address and first sentences."""
    yield from (f"# {config['site_name']}", "", f"> {config['site_description']}", "")
    nav = config["nav"]
    assert isinstance(nav, list)
    for section in nav:
        ((title, entries),) = section.items()
        if isinstance(entries, str):
            entries = [{title: entries}]
        else:
            yield from (f"## {title}", "")
        for entry in entries:
            ((name, page),) = entry.items()
            yield f"- [{name}]({page.removesuffix('.md')}.html): {_about(page)}"
        yield ""


def _about(page: str) -> str:
    """Return the beginning of a page's first paragraph."""
    parts = re.split(r"\n\s*\n", (TREE / page).read_text())
    paragraph = next(part for part in parts if part[0] not in "#<|!`" and part[:4] != "    ")
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split())).split()
    return " ".join(words[:_ABOUT_WORDS]) + ("" if len(words) <= _ABOUT_WORDS else " …")


def _write(page: str, text: str) -> None:
    (TREE / page).parent.mkdir(parents=True, exist_ok=True)
    (TREE / page).write_text(text)


def _copy(path: Path, page: str) -> None:
    (TREE / page).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, TREE / page)


if __name__ == "__main__":
    sys.exit(main())
