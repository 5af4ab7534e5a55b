"""Write docs/architecture.md: the subpackages of each package and their dependencies, from the imports.

`python tools/architecture.py` writes the page; `--check` exits with 1 where the page differs from the code. Both refuse
files that import each other, those imported inside functions and under `TYPE_CHECKING` included.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import click
import grimp

from runner.commands import cli

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("manifests", "stores", "reshard", "runner")

_HEAD = """\
# Architecture

Written by `make architecture` from the imports and the docstrings; `make check` fails when it is out of date.

An arrow means "imports". Arrows implied by others are omitted: where A imports B and B imports
C, there is no arrow from A to C. `runner.commands` imports the module of a command when it is called; those count, too.
`runner.train` has no arrow to it: `launch` starts it as a process, `python -m runner.train`. No file imports one that
imports it, and import-linter checks the layers (`pyproject.toml`).
"""


def main() -> int:
    """Write or check the page; return the exit code."""
    graph = grimp.build_graph(*PACKAGES)
    if cycle := find_cycle(graph):
        print(f"files import each other: {' -> '.join(cycle)}\nhint: move what both need to a third", file=sys.stderr)
        return 1
    page = render(graph)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
        return 0
    if PAGE.read_text() == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date\nhint: make architecture", file=sys.stderr)
    return 1


def find_cycle(graph: grimp.ImportGraph) -> list[str]:
    """Return modules of which each imports the next, the last one being the first again; empty where there are none."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle[::-1]
    return []


def render(graph: grimp.ImportGraph) -> str:
    """Return the page as Markdown with Mermaid figures."""
    arrows = {(a, b) for a, b in _imports(graph) if a.split(".")[0] != b.split(".")[0]}
    whole = {(a.split(".")[0], b.split(".")[0]) for a, b in arrows}
    sections = [_HEAD, "## Packages\n", _figure(PACKAGES, whole), _table({name: name for name in PACKAGES})]
    for package in PACKAGES[2:]:
        packages = _layers(package)
        inside = {
            (inner_a, inner_b)
            for a, b in _imports(graph)
            if (inner_a := _subpackage(a, package)) and (inner_b := _subpackage(b, package)) and inner_a != inner_b
        }
        sections += [
            f"## Subpackages of {package}\n",
            f"From the highest layer to the lowest: {', '.join(f'`{name}`' for name in packages)}.\n",
            _figure(packages, inside),
            _table({name: f"{package}.{name}" for name in packages}),
        ]
    return "\n".join(sections)


def _imports(graph: grimp.ImportGraph) -> Iterable[tuple[str, str]]:
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            yield module, imported
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None, name
        yield "runner.commands", command.callback.__module__


def _subpackage(module: str, package: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == package and len(names) > 1 else None


def _layers(package: str) -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == [package])
    return [layer for layer in layers if layer != "__main__"]


def _figure(packages: Iterable[str], arrows: set[tuple[str, str]]) -> str:
    known = list(packages)
    kept = {(a, b) for a, b in _reduced(arrows) if a in known and b in known}
    lines = [f"    {a} --> {b}" for a, b in sorted(kept, key=lambda arrow: [known.index(name) for name in arrow])]
    return "\n".join(["```mermaid", "flowchart TD", *(f"    {name}" for name in known), *lines, "```", ""])


def _reduced(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows of a graph without cycles that do not follow from others."""
    below: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in below:
            direct = {b for a, b in arrows if a == name}
            below[name] = direct.union(*(reach(other) for other in direct)) if direct else set()
        return below[name]

    return {(a, b) for a, b in arrows if not any(b in reach(c) for x, c in arrows if x == a and c != b)}


def _table(packages: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {_purpose(module)} |" for name, module in packages.items()]
    return "\n".join(["| package | what it is for |", "|---|---|", *rows, ""])


def _purpose(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")  # to import all would import torch
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
