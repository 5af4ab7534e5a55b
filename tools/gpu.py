"""Run the tests that need a GPU, or say which they are where there is none: `make test-gpu`.

Their results are bench/results/gpu-*.json; gpu-suite.json has how many tests passed, in which time. Those that time
nothing run side by side, those of test_figures.py alone after them. Without a GPU nothing is run, and the exit code
is 0. fastsafetensors, if installed, is timed beside the runner.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import torch
from compatibility import count

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import measure

PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu")
FIGURES = "tests/gpu/test_figures.py"
# A worker has a file, whose tests share ranks, most of which wait for each other, and measures only their memory.
_SIDE_BY_SIDE = ("-n", str(max(1, min(3, (os.cpu_count() or 1) // 2))), "--dist", "loadfile")
GROUPS = (("tests/gpu", f"--ignore={FIGURES}", *_SIDE_BY_SIDE), (FIGURES,))


def main() -> int:
    """Run or list the tests, and return the exit code."""
    if not torch.cuda.is_available():
        print(f"test-gpu: NO GPU HERE (torch {torch.__version__} finds none): nothing was tested. On one it would run:")
        for name, number in list_tests().items():
            print(f"  {number:3d} {name}")
        return 0
    if find_spec("fastsafetensors") is None:
        print("test-gpu: fastsafetensors is not installed, so loads are not compared with it", file=sys.stderr)
    began_s = time.monotonic()
    ended = [run(group) for group in GROUPS]
    write(ended, time.monotonic() - began_s)
    return int(any(code for code, _ in ended))


def run(group: Sequence[str]) -> tuple[int, dict[str, int]]:
    """Run a group of tests, and return pytest's exit code and the counts."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ended = subprocess.run([*PYTEST, *group, f"--junitxml={report}"], cwd=measure.ROOT)
        return ended.returncode, count(ElementTree.parse(report).getroot())


def write(ended: Sequence[tuple[int, dict[str, int]]], wall_s: float) -> None:
    """Write the sum of the groups' counts."""
    counts = {kind: sum(of[kind] for _, of in ended) for kind in ("passed", "failed", "skipped")}
    about = {**measure.circumstances(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    result = {"what": "tests that need a GPU", **about, **counts, "wall_s": round(wall_s, 1)}
    measure.write_result(result, str(measure.ROOT / "bench" / "results" / "gpu-suite.json"))


def list_tests() -> Counter[str]:
    """Return the tests that need a GPU, and how many cases each has, as pytest collects them."""
    command = [*PYTEST, "tests/gpu", "--collect-only", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=measure.ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    ids = [line for line in ended.stdout.splitlines() if "::" in line]
    return Counter(line.partition("[")[0].rpartition("/")[2] for line in ids)


if __name__ == "__main__":
    sys.exit(main())
