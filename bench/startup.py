"""Processor time of `--help`, of this checkout and of another one (a git worktree), in turn in one run.

git worktree add ../before 8edc073
.venv/bin/python bench/startup.py ../before
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from measure import ROOT, circumstances, median_ratio, take_turns

RESULTS = ROOT / "bench" / "results" / "startup.json"
COMMANDS = ("reshard", "runner")


def cpu_s(tree: Path, command: str) -> float:
    """Return the processor time, user and system, in which a checkout's command prints its help."""
    code = f"import sys; sys.argv = [{command!r}, '--help']; from {command}.cli import main; main()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # An installed package has its compiled modules; the turn of warmup compiles them here.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, check=True)
    assert b"Usage: " + command.encode() in ended.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=Path, help="checkout to compare with")
    parser.add_argument("--turns", type=int, default=25, help="runs of each command (default: 25)")
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "now": ROOT}
    measures = {
        f"{command} {which}": partial(cpu_s, tree, command) for command in COMMANDS for which, tree in trees.items()
    }
    turns = take_turns(measures, options.turns)
    found = {name: [turn[name] for turn in turns] for name in measures}
    result = {
        "what": "processor seconds, user and system, of --help: medians, and the medians of ratios within a turn",
        **circumstances(),
        "before": commit_of(trees["before"]),
        "turns": options.turns,
        "cpu_s": {name: round(statistics.median(times), 4) for name, times in found.items()},
        "ratio": {name: median_ratio(found[f"{name} now"], found[f"{name} before"]) for name in COMMANDS},
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
