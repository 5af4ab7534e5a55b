"""Processor time of `--help`, of this checkout and of another one (a git worktree), in turn in one run.

git worktree add /tmp/old COMMIT
python bench/startup.py /tmp/old [--runs 25] [--out bench/results/startup.json]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import measure

COMMANDS = ("reshard", "runner")


def cpu_s(tree: Path, command: str) -> float:
    """Return the processor time, user and system, in which a checkout's command prints its help."""
    code = f"import sys; sys.argv = [{command!r}, '--help']; from {command}.cli import main; main()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # An installed package has its compiled modules; the turn of warmup compiles them here.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, check=True)
    assert b"Usage: " + command.encode() in ended.stdout
    return measure.cpu_s_since(before)


def commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = measure.options_of(__doc__, runs=25)
    parser.add_argument("old", type=Path, help="checkout of the older commit")
    options = parser.parse_args()
    trees = {"old": options.old.resolve(), "now": measure.ROOT}
    measures = {
        f"{command} {which}": partial(cpu_s, tree, command) for command in COMMANDS for which, tree in trees.items()
    }
    turns = measure.take_turns(measures, options.runs)
    found = {name: [turn[name] for turn in turns] for name in measures}
    result = {
        "what": "processor seconds, user and system, of --help: medians, and the medians of ratios within a turn",
        **measure.circumstances(),
        "old_commit": commit_of(trees["old"]),
        "turns": options.runs,
        "cpu_s": {name: round(statistics.median(times), 4) for name, times in found.items()},
        "ratio": {name: measure.median_ratio(found[f"{name} now"], found[f"{name} old"]) for name in COMMANDS},
    }
    measure.write_result(result, options.out)


if __name__ == "__main__":
    main()
