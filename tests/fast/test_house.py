"""The house keeps its own rules: pins, file sizes, start-up time, what may be imported where."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("manifests", "reshard", "runner", "stores")
MAX_FILE_LINES = 400
# Names that say how a value came about, not what it is. Packages in PLAIN_NAMES have none, the others only fewer.
PARTICIPLES = frozenset(
    ["found", "said", "asked", "held", "kept", "laid", "left", "told", "known", "own", "one", "each"]
)
MOST_PARTICIPLES = 22
PLAIN_NAMES = frozenset(
    {
        "manifests/schedules", "reshard/archives", "reshard/checks", "reshard/cli", "reshard/copy", "reshard/delta",
        "reshard/draw", "reshard/estimate", "reshard/formats", "reshard/formatting.py", "reshard/layouts",
        "reshard/packing",
        "reshard/plans", "reshard/report", "reshard/tensors", "reshard/transforms", "runner/bundle",
        "runner/checkpoint", "runner/config", "runner/data", "runner/distributed", "runner/evaluation",
        "runner/launch", "runner/load", "runner/measure", "runner/models", "runner/parallel", "runner/pipeline",
        "runner/preflight", "runner/profiling", "runner/report", "runner/rundir", "runner/tensors",
        "runner/training", "stores/folders", "stores/hub", "stores/net", "stores/objects",
    }
)  # fmt: skip
# Packages that a packing node does not have, or that are slow to import.
HEAVY = {"numpy", "pyarrow", "safetensors", "tokenizers", "torch", "torchtitan", "transformers", "triton"}


def run_python(code: str, *args: str) -> str:
    """Return what a fresh interpreter prints."""
    command = [sys.executable, "-c", code, *args]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def read_constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}


def test_constraints_pin_every_dependency_to_one_version_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [project["dependencies"], *project["optional-dependencies"].values()]
    pins = read_constraints()
    for wanted in (Requirement(text) for texts in listed for text in texts):
        pin = pins[canonicalize_name(wanted.name)]
        assert pin.startswith("=="), wanted
        assert wanted.specifier.contains(pin.removeprefix("=="), prereleases=True), wanted


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "make test"]
    assert script.stat().st_mode & 0o111


def test_only_packages_list_their_public_names() -> None:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    lists = {str(path.relative_to(ROOT)) for path in sources if re.search("^__all__", path.read_text(), re.MULTILINE)}
    assert lists == set()


def test_no_source_file_is_longer_than_400_lines() -> None:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def bound_names(tree: ast.Module) -> list[str]:
    """Return the names of variables, arguments, attributes and functions that a module binds, without underscores."""
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.append(name.strip("_"))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append(name.strip("_"))
            case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                names.append(name.strip("_"))
    return names


def test_names_are_nouns_of_what_they_are() -> None:
    participles: dict[str, list[str]] = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        place, names = path.relative_to(ROOT), bound_names(ast.parse(path.read_text()))
        words = PARTICIPLES - {"left"} if "right" in names else PARTICIPLES  # a side
        participles.setdefault("/".join(place.parts[:2]), []).extend(
            f"{place}: {name}" for name in names if name in words
        )
    assert {package: participles[package] for package in PLAIN_NAMES if participles[package]} == {}
    assert sum(map(len, participles.values())) <= MOST_PARTICIPLES


@pytest.mark.parametrize(
    "module",
    [
        "manifests.store",
        "manifests.models",
        "reshard.cli.command",
        "runner.launch.command",
        "runner.evaluation.command",
    ],
)
def test_import_brings_in_neither_torch_nor_other_heavy_packages(module: str) -> None:
    loaded = run_python(f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})")
    assert set(loaded.split()) & HEAVY == set()


@pytest.mark.parametrize("command", ["reshard", "runner"])
def test_help_imports_at_most_twice_the_modules_of_click(command: str) -> None:
    count = "print(len(sys.modules))"
    of_click = int(run_python(f"import sys, click; {count}"))
    code = f"import sys\nfrom {command}.cli import main\ntry: main()\nfinally: {count}"
    of_help = int(run_python(code, "--help").splitlines()[-1])
    assert of_help < 2 * of_click


def test_every_verb_of_the_runner_is_found_where_its_list_says() -> None:
    listed = run_python("from runner.cli import main; main()", "--help").partition("Commands:\n")[2]
    verbs = [line.split()[0] for line in listed.splitlines()]
    assert verbs == ["launch", "status", "list", "logs", "cancel", "measure", "report", "eval", "prove", "completion"]
    shown = run_python(
        "import sys\nfrom contextlib import suppress\nfrom runner.cli import main\n"
        "for verb in sys.argv[1:]:\n    sys.argv[1:] = [verb, '--help']\n    with suppress(SystemExit): main()",
        *verbs,
    )
    assert [verb for verb in verbs if f"Usage: runner {verb} " not in shown] == []


def test_modules_run_as_scripts_end_with_their_call() -> None:
    """What is defined below `if __name__ == "__main__"` does not exist when it runs."""
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    scripts = [path for path in sources if "\nif __name__ ==" in path.read_text()]
    assert scripts
    assert [str(path) for path in scripts if not isinstance(ast.parse(path.read_text()).body[-1], ast.If)] == []


def test_properties_see_the_same_examples_whatever_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "many_constants.py").write_text(f"NUMBERS = {list(range(10**6, 10**6 + 999))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    numbers = list[int]()
    draw = given(number=st.integers(0, 10**9))(lambda number: numbers.append(number))
    draw()
    importlib.import_module("many_constants")
    draw()
    half = len(numbers) // 2
    assert numbers[:half] == numbers[half:]
