"""Run the benchmarks of docs/performance.md one after the other, and write bench/results.

    python bench/all.py [NAME ...] [--peers]

Without names, all that need no packages of peers are run; with --peers, those that do, which `make bench-peers` has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLD_COMMIT = "8edc073"  # what this one is compared with
_OLD = "OLD"  # in a command: a checkout of that commit


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page: its title, the command that makes its figures, and whether it needs other packages."""

    title: str
    command: str
    needs_peers: bool = False


SECTIONS = {
    "pack-4gb": Section("Packing", "pack.py --gb 4 --peers", needs_peers=True),
    "pack-4gb-full-cache": Section("Packing with a full page cache", "pack.py --gb 4 --runs 3 --full-cache"),
    "reshard-4gb": Section("Resharding with optimizer state", "resharding.py --gb 4"),
    "merge-4gb": Section("Merging adapters", "merge.py --gb 4"),
    "delta": Section("Deltas of weights", "delta.py speed --gb 4 --runs 4", needs_peers=True),
    "delta-density": Section("How much a step changes", "delta.py density"),
    "load": Section("Loading a stage", "load.py --runs 3", needs_peers=True),
    "streams": Section("Reading from remote stores", "streams.py --runs 2"),
    "step": Section("A training step", "step.py"),
    "memory": Section("Memory by microbatches", "memory.py --schedules 1F1B Interleaved1F1B"),
    "launch": Section("From launch to first loss", "launch.py --runs 2"),
    "trainers": Section("Beside torchtitan's trainer", "trainers.py"),
    "balance": Section("Balanced by measured times", "balance.py"),
    "bubble": Section("The pipeline bubble", "bubble.py"),
    "search": Section("Predicted step times", "search.py"),
    "growth": Section("What must not grow", "growth.py --runs 7"),
    "saving": Section("Saving", "saving.py"),
    "beside": Section("Steps beside a save", "beside.py"),
    "imports": Section("Checkpoints of other trainers", "imports.py --gb 4 --ranks 2"),
    "checksums": Section("Checksums of torch.save files", "checksums.py"),
    "deepseek": Section("DeepSeek-V3's shape", "deepseek.py --real"),
    "deepseek-megatron": Section("DeepSeek-V3 as Megatron-Core saves it", "deepseek.py --megatron"),
    "threads": Section("Threads, where cores and disks are simulated", "threads.py"),
    "scaling": Section("Many tensors, many stages, many bytes", "scaling.py"),
    "startup": Section("Start-up", f"startup.py {_OLD}"),
    "paired": Section("Beside an older commit", f"paired.py {_OLD}"),
}


def main() -> int:
    """Run the benchmarks; return 1 if one failed, of which the older figures stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*SECTIONS, []], help=", ".join(SECTIONS))
    parser.add_argument("--peers", action="store_true", help="run those that need packages of peers")
    options = parser.parse_args()
    names = options.names or [name for name, each in SECTIONS.items() if each.needs_peers == options.peers]
    failed = [name for name in names if not run(name)]
    for name in failed:
        print(f"bench: {name} failed", file=sys.stderr)
    return int(bool(failed))


def run(name: str) -> bool:
    """Run a benchmark, and return whether it succeeded."""
    script, *arguments = SECTIONS[name].command.split()
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        if _OLD in arguments:
            arguments[arguments.index(_OLD)] = stack.enter_context(checkout(OLD_COMMIT))
        result = ROOT / "bench" / "results" / f"{name}.json"
        command = [sys.executable, str(ROOT / "bench" / script), *arguments, "--out", str(result)]
        load = os.getloadavg()[0]
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    print(f"bench: {name}, {time.monotonic() - began_s:.0f} s, load average {load:.1f} before it", flush=True)
    return ended.returncode == 0


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[str]:
    """Yield a work tree of an older commit."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="bench-old-") as folder:
        subprocess.run([*git, "add", "--quiet", "--detach", f"{folder}/old", commit], check=True)
        try:
            yield f"{folder}/old"
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/old"], check=True)


if __name__ == "__main__":
    sys.exit(main())
