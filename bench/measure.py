"""What benches share: commands with their time and memory, ratios within a turn, and where and when it all ran.

A bench calls `take_turns` with what it compares, so that a slow moment of the machine meets all of it alike, and
ends with `write_result({"what": …, **circumstances(), …}, options.out)`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "RESHARD",
    "ROOT",
    "Run",
    "circumstances",
    "load_average",
    "median_ratio",
    "options_of",
    "run_measured",
    "run_quietly",
    "run_ranks",
    "summary",
    "take_turns",
    "write_result",
]

ROOT = Path(__file__).resolve().parents[1]
RESHARD = (sys.executable, "-m", "reshard")

_LOOK_S = 0.005  # between looks at a command's memory

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a command took; `anonymous_nbytes` is the most anonymous memory that it was seen with."""

    wall_s: float
    anonymous_nbytes: int


def run_quietly(command: Sequence[str]) -> None:
    """Run a command that must end well, and drop what it prints."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_measured(command: Sequence[str], out: Path | None = None) -> Run:
    """Run a command that must end well; what it wrote at `out` is gone afterwards, and nothing waits to be flushed."""
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        most = max(most, _anonymous_nbytes(process.pid))
        time.sleep(_LOOK_S)
    wall_s = time.perf_counter() - began_s
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    if out is not None:
        shutil.rmtree(out)
        os.sync()  # what one run left to write is not for the next one to wait for
    return Run(wall_s=wall_s, anonymous_nbytes=most)


def run_ranks(num_ranks: int, script: str, *args: str) -> None:
    """Run a script under torchrun, one thread a rank, our packages at hand."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*torchrun, script, *args], check=True, env=environment)


def take_turns(measures: Mapping[str, Callable[[], Found]], num_turns: int) -> list[dict[str, Found]]:
    """Give what all measures found, turn by turn; one more turn, the first, only warms up."""
    return [{name: measure() for name, measure in measures.items()} for _ in range(num_turns + 1)][1:]


def median_ratio(ours: Iterable[float], theirs: Iterable[float], digits: int = 3) -> float:
    """Give the median of ratios, each of two values of the same turn."""
    return round(statistics.median(one / max(other, 1e-9) for one, other in zip(ours, theirs, strict=True)), digits)


def summary(runs: Sequence[Run]) -> dict[str, object]:
    """Give a command's times and its peak of memory."""
    return {
        "wall_s": [round(run.wall_s, 3) for run in runs],
        "median_s": round(statistics.median(run.wall_s for run in runs), 3),
        "peak_anonymous_mb": round(max(run.anonymous_nbytes for run in runs) / 1e6, 1),
    }


def load_average() -> float:
    """Give how many processes wanted a core, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def circumstances() -> dict[str, object]:
    """Give what a result says of the day, the code and the machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def options_of(doc: str | None, *, gb: float | None = None, runs: int = 5) -> argparse.ArgumentParser:
    """Give a parser of the options that benches share; `doc` is the bench's own docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if gb is not None:
        parser.add_argument("--gb", type=float, default=gb)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--folder", help="where to put the scratch folder")
    parser.add_argument("--out", help="where to write the result")
    return parser


def write_result(result: Mapping[str, Any], out: str | None) -> None:
    """Print a result as JSON, and write it where it is wanted."""
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if out:
        Path(out).write_text(text)


def _anonymous_nbytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0
