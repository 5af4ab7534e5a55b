"""Run the tests that need a GPU, or say which they are where there is none: `make test-gpu`.

Their results are bench/results/gpu-*.json; gpu-suite.json has how many tests passed, in which time. Without a GPU
nothing is run, and the exit code is 0. fastsafetensors, if installed, is timed beside the runner.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import torch
from compatibility import count

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import measure

PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu")


def main() -> int:
    """Run or list the tests, and return the exit code."""
    if not torch.cuda.is_available():
        print(f"test-gpu: NO GPU HERE (torch {torch.__version__} finds none): nothing was tested. On one it would run:")
        for name, number in list_tests().items():
            print(f"  {number:3d} {name}")
        return 0
    if find_spec("fastsafetensors") is None:
        print("test-gpu: fastsafetensors is not installed, so loads are not compared with it", file=sys.stderr)
    with TemporaryDirectory() as folder:
        report, began_s = Path(folder) / "report.xml", time.monotonic()
        ended = subprocess.run([*PYTEST, f"--junitxml={report}"], cwd=measure.ROOT)
        wall_s = time.monotonic() - began_s
        counts = count(ElementTree.parse(report).getroot())
    about = {**measure.circumstances(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    result = {"what": "tests that need a GPU", **about, **counts, "wall_s": round(wall_s, 1)}
    measure.write_result(result, str(measure.ROOT / "bench" / "results" / "gpu-suite.json"))
    return ended.returncode


def list_tests() -> Counter[str]:
    """Return the tests that need a GPU, and how many cases each has, as pytest collects them."""
    command = [*PYTEST, "--collect-only", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=measure.ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    ids = [line for line in ended.stdout.splitlines() if "::" in line]
    return Counter(line.partition("[")[0].rpartition("/")[2] for line in ids)


if __name__ == "__main__":
    sys.exit(main())
