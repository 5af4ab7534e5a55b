"""Run the tests of the half that needs no torch on every supported Python: `make test-pythons`.

For each of 3.11 to 3.14, the first of: `uv python find`, pythonX.Y on PATH, pyenv's and /usr/bin's. One that is not
here is skipped, loudly. Each gets an environment of its own, .venv-python-X.Y, with the package and no extra, and so no
torch. Tests that need packages of the runner are left out and counted. `--only 3.13` runs one, further arguments are
pytest's. Standard library alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TESTS = tuple(f"tests/fast/{package}" for package in ("manifests", "reshard", "stores"))
NEEDED = ("hypothesis", "jsonschema", "packaging", "pytest>=9", "pytest-timeout", "pytest-xdist", "syrupy>=5")
# Of the extras: a test that fails for the lack of one is left out.
ABSENT = (
    "matplotlib",
    "model_signing",
    "moto",
    "obstore",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)


def main() -> int:
    """Run them all, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PYTHONS, action="append")
    options, arguments = parser.parse_known_args()
    failed = 0
    for version in options.only or PYTHONS:
        python = find_python(version)
        if python is None:
            print(f"test-pythons: NO PYTHON {version} HERE: it was not tested", flush=True)
            continue
        counts = run(build(version, python), arguments)
        failed += counts["failed"]
        shown = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped", "left out"))
        print(f"test-pythons: Python {version}: {shown}", flush=True)
    return int(failed > 0)


def find_python(version: str) -> str | None:
    """Return a Python of this version that starts; None: there is none here."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    found = [shutil.which(f"python{version}"), *map(str, pyenv), f"/usr/bin/python{version}"]
    if shutil.which("uv"):
        told = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True)
        found.insert(0, told.stdout.strip() if told.returncode == 0 else None)
    code = f"import sys, venv; sys.exit('.'.join(map(str, sys.version_info[:2])) != {version!r})"
    for python in found:
        if (
            python
            and Path(python).exists()
            and not subprocess.run([python, "-c", code], capture_output=True).returncode
        ):
            return python
    return None


def build(version: str, python: str) -> str:
    """Build an environment, and return its Python."""
    folder = ROOT / f".venv-python-{version}"
    if not folder.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    own = str(folder / "bin" / "python")
    subprocess.run([own, "-m", "pip", "install", "-qq", "setuptools>=77.0.3", *NEEDED], check=True)
    subprocess.run([own, "-m", "pip", "install", "-qq", "--no-build-isolation", "-e", str(ROOT)], check=True)
    return own


def run(python: str, arguments: list[str]) -> Counter[str]:
    """Run the tests, and return how many passed, failed, were skipped or left out; print those that failed."""
    counts = Counter[str]()
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["-m", "not process and not slow", f"--junitxml={report}", *(arguments or TESTS)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(ended.stdout + ended.stderr)
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            kind, said = outcome(case)
            counts[kind] += 1
            if kind == "failed":
                print(f"FAILED {case.get('classname')} {case.get('name')}\n{said[-2000:]}", file=sys.stderr)
    return counts


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Return what came of a test of a JUnit report, and what a failure said."""
    for child in case:
        said = f"{child.get('message')}\n{child.text}"
        if child.tag in ("failure", "error"):
            is_absent = any(f"No module named '{name}" in said for name in ABSENT)
            return ("left out" if is_absent else "failed"), said
        if child.tag == "skipped":
            return "skipped", said
    return "passed", ""


if __name__ == "__main__":
    sys.exit(main())
