"""Write docs/errors.md: every error code, its cause and its cure, from docs/errors/*.toml.

`python tools/errors.py` writes the page; `--check` exits with 1 where the page is out of date, where the code raises a
code that no table explains, where a table explains a code that nothing raises, or where the class of an error is not
that of its area.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
TABLES = ROOT / "docs" / "errors"
PACKAGES = ("manifests", "stores", "reshard", "runner")
# The class of an area's errors; `UsageError`, `UnreachableError` and `RankError` are of any area.
CLASSES = {
    "CheckpointError": ("checkpoint", "resume"),
    "DataError": ("data", "tokenizer"),
    "LaunchError": ("launch",),
    "LayoutError": ("layout",),
    "LogError": ("log",),
    "ManifestError": ("manifest",),
    "ModelError": ("config", "model"),
    "OutputError": ("output",),
    "ScheduleError": ("schedule",),
    "ShardError": ("header", "shard"),
    "SignatureError": ("signature",),
    "SourceError": ("source",),
    "StoreError": ("store",),
    "InputError": ("options", "rank", "system"),
}
ARGUMENTS = ("code", "error_code")  # the second of reports of errors
CODE = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")

_HEAD = """\
# Errors

Every error that a user can fix has a stable code, in brackets after the first line of the message. `--json` prints it
as `error.code`; scripts and tests may rely on it; the wording may change. Exit codes: 0 done, 1 a bug in this software,
2 usage, 3 bad input, 4 verification differs, 5 a rank failed, 130 interrupted, 141 the reader of standard output has
exited.

Refused inputs leave no output behind; among them are:

- a source whose tensors do not match its config: missing, unexpected, duplicate, of another shape, or in a shard that
  the index does not name;
- invalid headers: overlaps, gaps, offsets beyond the end, duplicate keys, invalid JSON;
- a layout that omits a module, names one twice, or has more stages than modules;
- an existing output, unless `--force` is given, and one inside its source, or around it;
- unsupported architectures and config fields ([models.md](models.md));
- a number of ranks that is not a multiple of the pipeline ranks, and batches that the schedule cannot divide;
- combinations that torch would silently compute wrong: zero-bubble schedules with compiled layers, tensor parallelism
  for a family where it is not verified, a schedule whose last stage takes microbatches out of order;
- a missing shard or a single flipped bit: all ranks exit together, with one message and exit code 3 (5 for an I/O
  error of the disk, where a restart may help).

Written by `make errors` from `docs/errors/*.toml`; `make check` fails when it is out of date.
"""


def main() -> int:
    """Write or check the page; return the exit code."""
    gc.disable()  # trees stay to the end
    tables = read_tables()
    page = render(tables)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
        return 0
    problems = [*find_problems(tables), *misplaced_classes()]
    if not PAGE.exists() or PAGE.read_text() != page:
        problems.append(f"{PAGE.relative_to(ROOT)} is out of date: make errors")
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return bool(problems)


def read_tables() -> dict[str, dict[str, Mapping[str, str]]]:
    """Return the explained codes by area: `{"source": {"missing-tensor": {"cause": ..., "cure": ...}}}`."""
    tables = {}
    for path in sorted(TABLES.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        tables[path.stem] = {name: table[name] for name in sorted(table)}
    return tables


@cache
def _trees() -> Mapping[Path, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in paths}


def raised_codes() -> dict[str, str]:
    """Return every code that the packages say, with the first place that says it."""
    constants = {name for tree in _trees().values() for name in _names_given_as_code(tree)}
    found: dict[str, str] = {}
    for path, tree in _trees().items():
        for code, line in _codes_in(tree, constants):
            found.setdefault(code, f"{path.relative_to(ROOT)}:{line}")
    return found


def find_problems(tables: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Iterator[str]:
    """Yield what disagrees between the code and the tables."""
    explained = {f"{area}.{name}" for area, table in tables.items() for name in table}
    raised = raised_codes()
    for code in sorted(set(raised) - explained):
        yield f"{raised[code]}: {code} is not in docs/errors/{code.partition('.')[0]}.toml"
    for code in sorted(explained - set(raised)):
        yield f"docs/errors/{code.partition('.')[0]}.toml: nothing raises {code}"
    for area, table in tables.items():
        for name, entry in table.items():
            if set(entry) != {"cause", "cure"} or not all(entry.values()):
                yield f"docs/errors/{area}.toml: {name}: expected a cause and a cure"


def misplaced_classes() -> Iterator[str]:
    """Yield the errors that are raised as another class than their area's."""
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES):
                continue
            for keyword in node.keywords:
                code = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg != "code" or not isinstance(code, str):
                    continue
                if code.partition(".")[0] not in CLASSES[node.func.id]:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {code} is not for {node.func.id}"


def render(tables: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """Return the page as Markdown."""
    sections = [_HEAD]
    for area, table in tables.items():
        rows = [f"| `{area}.{name}` | {entry['cause']} | {entry['cure']} |" for name, entry in table.items()]
        sections.append("\n".join([f"## {area}\n", "| code | cause | cure |", "|---|---|---|", *rows, ""]))
    return "\n".join(sections)


def _names_given_as_code(tree: ast.Module) -> Iterator[str]:
    """Yield the names of constants in `code=NAME`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ARGUMENTS and isinstance(node.value, ast.Name):
            yield node.value.id


def _codes_in(tree: ast.Module, constants: Collection[str] = ()) -> Iterator[tuple[str, int]]:
    """Yield the texts that are given as `code`: by keyword, as a default, or assigned to a constant or `...code`."""
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
            values = [node.value]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and any(
                isinstance(t, ast.Name) and (t.id.lower().endswith("code") or t.id in constants) for t in targets
            ):
                values = [node.value]
        elif isinstance(node, ast.arguments):
            named = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            values = [default for argument, default in named if argument.arg in ARGUMENTS and default is not None]
        for value in values:
            for part in ast.walk(value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and CODE.fullmatch(part.value):
                    yield part.value, part.lineno


if __name__ == "__main__":
    sys.exit(main())
