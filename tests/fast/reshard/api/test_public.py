"""The public functions and classes: documented, each with an example that runs, imported when they are used."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import llama_config, write_model
from tests.fast.reshard.transforms.adapters import write_adapter
from tools import api

ROOT = Path(__file__).parents[4]
PACKAGES = ("reshard", "runner")


def public(package: str, kinds: tuple[str, ...] = ("function", "class")) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(package)
    for name in module.__all__:
        found = getattr(module, name)
        if ("function" if inspect.isfunction(found) else "class" if inspect.isclass(found) else "other") in kinds:
            yield f"{package}.{name}", found


FUNCTIONS = [pair for package in PACKAGES for pair in public(package, ("function",))]
CLASSES = [pair for package in PACKAGES for pair in public(package, ("class",))]


def methods_of(found: object) -> Iterator[object]:
    for name, member in vars(found).items():
        if not name.startswith("_") and inspect.isfunction(member):
            yield member


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists_and_is_listed_once(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert {name for name in module.__all__ if not hasattr(module, name)} == set()
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_fields_on_the_page_have_types_that_are_public() -> None:
    """Following attributes never leads to a private class; the fields of a manifest are those of the format."""
    import manifests.schema
    import reshard

    aliases = {
        "Address",
        "ContextMethod",
        "ExportDtype",
        "Holds",
        "HostMemory",
        "Plain",
        "Policy",
        "Recompute",
        "Style",
        "TrainingDtype",
    }
    standard = {"Any", "Iterator", "Mapping", "None"}
    text = api.render().partition("\n## runner\n")[0]
    fields = "".join(re.findall("^Fields: .*$", text, re.MULTILINE))
    types = {name for kind in re.findall(r"`\w+: ([^`]+)`", fields) for name in re.findall(r"\b[A-Z]\w+", kind)}
    of_format = {name for name, kind in vars(manifests.schema).items() if inspect.isclass(kind)}
    assert types - aliases - standard - of_format <= set(reshard.__all__)
    assert {"`stages: tuple[StagePlan, ...]`", "`layout: StageLayout`"} <= set(re.findall("`[^`]+`", fields))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_subpackage_has_a_public_name(package: str) -> None:
    """Python binds a subpackage's name to it when it is imported, over the function of that name."""
    modules = {path.stem for path in (ROOT / package).glob("*.py")}
    modules |= {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert modules.isdisjoint(importlib.import_module(package).__all__)


@pytest.mark.parametrize(("name", "function"), [*FUNCTIONS, *CLASSES])
def test_docstrings_say_what_is_done_first_and_name_units_shapes_and_errors(name: str, function: object) -> None:
    members = [function, *methods_of(function)] if inspect.isclass(function) else [function]
    for member in members:
        said = inspect.getdoc(member) or ""
        first = said.partition("\n")[0]
        assert first.endswith((".", ":")) or "\n" in said, (name, member)
        assert not first.startswith(("Give ", "Gives ")), (name, member)
        if inspect.isfunction(member):
            annotations = str(inspect.signature(member))
            if "->" in annotations and re.search(r"Tensor\b|Array|nn\.Module", annotations):
                assert "Shapes:" in said, (name, member)


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_public_functions_name_their_errors_and_have_an_example(name: str, function: object) -> None:
    said = inspect.getdoc(function) or ""
    assert "Raises:" in said, name
    package, _, short = name.partition(".")
    shown = (path.read_text() for path in (ROOT / "examples").glob("*.py"))
    assert ">>> " in said or any(f"{package}.{short}(" in text for text in shown), name


def test_doctests_of_the_public_api_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one folder, as a reader would: check, plan, pack, open, verify, diff, export, inspect."""
    import reshard

    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", llama_config())
    write_adapter(tmp_path / "adapter")
    order = (
        "check",
        "plan",
        "pack",
        "open",
        "PackedModel",
        "PackedStage",
        "verify",
        "diff",
        "export",
        "merge",
        "inspect",
        "layout",
        "commit",
        "publish_delta",
        "apply_delta",
        "delta_log",
        "verify_delta",
        "prune_delta",
        "fold_delta",
    )
    finder, runner = doctest.DocTestFinder(recurse=True), doctest.DocTestRunner()
    for name in order:
        for test in finder.find(getattr(reshard, name), name, globs={"reshard": reshard, "Path": Path}):
            runner.run(test)
    assert runner.failures == 0
    assert runner.tries >= 10
    tested = {name for name, found in public("reshard", ("function",))}
    assert tested <= {
        f"reshard.{name}" for name in (*order, "sign", "push")
    }  # tests/fast/reshard/checks/test_sign.py, test_push.py


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_nothing_of_it(package: str) -> None:
    code = f"import sys, {package}; print([name for name in sys.modules if name.startswith('{package}.')])"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "[]\n"


def test_packing_imports_what_it_needs_and_reading_as_numpy_no_torch(tmp_path: Path) -> None:
    write_model(tmp_path / "model", llama_config())
    code = (
        "import sys, reshard; reshard.pack('model', 'out', 'pp=2'); "
        "assert {'importlib.metadata', 'manifests.models.memory'}.isdisjoint(sys.modules); "
        "reshard.open('out').stage(0).state_dict(dtype='fp32'); "
        "print({'torch', 'safetensors'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "set()\n", ended.stderr


def test_results_print_on_a_few_lines_however_large_the_model_is(tmp_path: Path) -> None:
    import reshard

    write_model(tmp_path / "model", llama_config(num_hidden_layers=60))
    done = reshard.pack(tmp_path / "model", tmp_path / "packed", layout="pp=2")
    planned, opened = reshard.plan(tmp_path / "model", "pp=2"), reshard.open(tmp_path / "packed")
    results = (
        done,
        opened,
        opened.manifest,
        opened.stage(0),
        planned,
        planned.stages[0],
        planned.layout,
        planned.forecast,
    )
    for result in (*results, planned.checkpoint, planned.checkpoint.shape):
        assert len(repr(result)) < 800, type(result)
        assert "layers.30" not in repr(result)
    stage = opened.stage(0)
    assert (stage.modules, stage.nbytes) == (planned.stages[0].modules, planned.stages[0].nbytes)
    assert f"num_params={stage.num_params}" in repr(stage)
