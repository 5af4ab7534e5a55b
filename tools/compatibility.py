"""Run the suites that depend on torch on another release of it, and write docs/compatibility.md from what was recorded.

`python tools/compatibility.py --torch 2.15.0` builds an environment of its own, .venv-torch-2.15.0, from the package
registry (with CUDA packages, several GB; it runs on CPUs), runs the suites there, and writes their counts and times to
bench/results/torch-2.15.0.json. `--in PYTHON` takes
an environment that exists, `--only parity` renews one suite of a record. Without
`--torch` the page alone is written; `--check` exits with 1 where it is out of date. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "torchtitan", "transformers", "safetensors", "numpy")
SUITES: dict[str, tuple[str, ...]] = {
    "logits": (
        "tests/fast/runner/models/test_transformers_logits.py",
        "tests/fast/runner/preflight/test_torch_releases.py",
    ),
    "both implementations": ("tests/fast/runner/models/test_titans_on_transformers.py",),
    "families": ("tests/process/runner/models/test_families.py",),
    "parity": ("tests/process/runner/pipeline/test_parity.py",),
    "schedules": ("tests/fast/manifests/schedules", "tests/process/runner/pipeline/test_schedule_csv.py"),
    "ties": ("tests/process/runner/pipeline/test_ties.py",),
    "checkpoints": ("tests/process/runner/checkpoint/test_resume.py",),
    "FSDP and TP": ("tests/process/runner/parallel",),
}
INTRODUCTION = """# Compatibility

What was run, and on which releases: tests that passed, of those that ran, and their time on shared CPU cores, with
gloo. `make test` runs everything on torch 2.13.0, the release of `constraints.txt`; its column here is of runs without
torchtitan. A suite without a figure (-) was not run on that release. `make test-torch TORCH=2.15.0` runs them on
another one; this page is written from what it records in `bench/results/torch-*.json`.

"""
LEGEND = """
*logits*: every family against transformers, whole and cut into stages. *both implementations*: architectures that
torchtitan has, too; these runs also compared Llama on its modules, which no model is built of any more
([ADR 0047](adr/0047-models-are-built-of-transformers-modules-alone.md)). *families*: every family packed, trained on
two ranks, saved and exported, against transformers. *parity*: all seven schedules and tables from files, on one, two
and four ranks, tied and untied: bitwise equal to one process, and to transformers within 1e-5.
*schedules*: tables against torch's own. *ties*: replicas of tied weights. *checkpoints*: saved, resumed, and resumed at
other degrees. *FSDP and TP*: FSDP2, HSDP, replicas, tensor parallelism and their combinations, and their checkpoints.

torch before 2.13 is refused when a run starts; a release newer than those that were tested is noted. A release counts
as tested once *logits*, *parity* and *ties* have passed on it.
"""


def main() -> int:
    """Run, write or check; return the exit code."""
    options = _parser().parse_args()
    if options.torch:
        code = run(options.torch, options.environment, options.only)
        PAGE.write_text(render())
        return code
    if not options.check:
        PAGE.write_text(render())
    elif not PAGE.exists() or PAGE.read_text() != render():
        print(f"{PAGE.relative_to(ROOT)} is out of date: python tools/compatibility.py", file=sys.stderr)
        return 1
    return 0


def run(release: str, environment: str | None, only: Sequence[str] = ()) -> int:
    """Run the suites on a release of torch, or `only` some, record them, and return the exit code."""
    name = f"torch-{release}"
    python = environment or build(ROOT / f".venv-{name}", release)
    found = _versions(python)
    if found["torch"].split("+")[0] != release:
        print(f"{python} has torch {found['torch']}", file=sys.stderr)
        return 2
    suites: dict[str, dict[str, Any]] = {}
    result = {"what": f"suites on torch {release}", **_circumstances(found), "suites": suites}
    record = RESULTS / f"{name}.json"
    if only and record.exists() and (before := json.loads(record.read_text()))["versions"] == result["versions"]:
        suites |= before["suites"]  # the others
    for suite, files in SUITES.items():
        if not only or suite in only:
            suites[suite] = {**run_suite(python, suite, files), "commit": result["commit"]}
            record.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(suite["failed"] for suite in suites.values()))


def build(folder: Path, release: str) -> str:
    """Build an environment, torch first: that the rest leaves it alone is part of the test. Return its Python."""
    python = str(folder / "bin" / "python")
    if not folder.exists():
        print(f"test-torch: {folder.name}: torch {release}, several GB", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    _pip(python, f"torch=={release}", "setuptools>=77.0.3")  # also where an interrupted build left the folder
    before = _frozen(python, "torch", "triton", "nvidia-", "cuda-")
    with TemporaryDirectory() as folder_of_lock:
        lock = Path(folder_of_lock) / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        lock.write_text("".join(line for line in lines if not line.startswith(("torch==", "triton==", "setuptools=="))))
        _pip(python, "-c", str(lock), "--no-build-isolation", "-e", f"{ROOT}[runner,test]")
    after = _frozen(python, "torch", "triton", "nvidia-", "cuda-")
    if changed := [line for line in before if line not in after]:
        raise SystemExit(f"installing reshard[runner,test] changed {', '.join(changed)}")
    return python


def run_suite(python: str, suite: str, files: Iterable[str]) -> dict[str, Any]:
    """Run the tests of a suite that `make test` runs, and return their counts and their time in seconds."""
    print(f"test-torch: {suite}", flush=True)
    environment = {"TEST_PATIENCE": "4", **os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    with TemporaryDirectory() as folder:
        report, began_s = Path(folder) / "report.xml", time.monotonic()
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={report}"]
        ended = subprocess.run([*command, *files], cwd=ROOT, env=environment)
        wall_s = time.monotonic() - began_s
        if not report.exists():
            raise SystemExit(f"{suite}: pytest exited with code {ended.returncode}")
        counts = count(ElementTree.parse(report).getroot())
    return {**counts, "wall_s": round(wall_s, 1)}


def count(report: ElementTree.Element) -> dict[str, int]:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    counts = Counter[str]()
    for case in report.iter("testcase"):
        kinds = {child.tag for child in case}
        counts["failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"] += 1
    return {kind: counts[kind] for kind in ("passed", "failed", "skipped")}


def recorded() -> list[dict[str, Any]]:
    """Return the recorded runs, by release."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("torch-*.json")]
    return sorted(found, key=lambda run: (_release(run["versions"]["torch"]), run["versions"]["torchtitan"] is None))


def render() -> str:
    """Return the page."""
    columns = [["torch", "torchtitan", "transformers", "Python", *SUITES, "run"]]
    for found in recorded():
        versions, cells = found["versions"], [_cell(found["suites"].get(suite)) for suite in SUITES]
        names = [versions["torch"], versions["torchtitan"] or "-", versions["transformers"], found["python"]]
        commits = dict.fromkeys(suite["commit"] for suite in found["suites"].values())
        columns.append([*names, *cells, f"{found['date']}, {' '.join(commits)}"])
    lines = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    lines.insert(1, "|---" * len(columns) + "|")
    return INTRODUCTION + "\n".join(lines) + "\n" + LEGEND


def _cell(suite: dict[str, Any] | None) -> str:
    if suite is None:
        return "-"
    ran = suite["passed"] + suite["failed"]
    return f"{suite['passed']} of {ran}, {suite['wall_s'] / 60:.1f} min"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split("."))


def _versions(python: str) -> dict[str, Any]:
    """Return the installed versions of the packages that matter, None for those that are not installed."""
    code = (
        "import json, sys\nfrom importlib.metadata import PackageNotFoundError, version\n"
        "def of(name):\n    try:\n        return version(name)\n    except PackageNotFoundError:\n        return None\n"
        "print(json.dumps({name: of(name) for name in sys.argv[1:]} | {'python': sys.version.split()[0]}))"
    )
    found: dict[str, Any] = json.loads(subprocess.check_output([python, "-c", code, *PACKAGES]))
    return found


def _circumstances(found: dict[str, Any]) -> dict[str, Any]:
    git = ("git", "-C", str(ROOT))
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    others = (":!bench/results", ":!docs/compatibility.md")  # what this script writes
    status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *others]
    is_changed = subprocess.check_output(status, text=True).strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit + ("+" if is_changed else ""),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": found.pop("python"),
        "versions": found,
    }


def _pip(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "-qq", "--no-cache-dir", *arguments], check=True)


def _frozen(python: str, *prefixes: str) -> list[str]:
    found = subprocess.check_output([python, "-m", "pip", "freeze", "--all"], text=True).splitlines()
    return [
        line for line in found if line.startswith(prefixes) and not line.startswith(("torchtitan", "torch_", "torchd"))
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="VERSION", help="run the suites on this release")
    parser.add_argument("--in", dest="environment", metavar="PYTHON", help="an environment that exists")
    parser.add_argument("--only", action="append", choices=list(SUITES), default=[], help="run this suite alone")
    parser.add_argument("--check", action="store_true", help="check that the page is up to date")
    return parser


if __name__ == "__main__":
    sys.exit(main())
