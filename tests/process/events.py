"""What the tests of struck commands share: how many events there are, and the process that runs the commands."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# `make test` runs the first few of each kind, `make test-all` all 1,200: each act on each operation, many times.
NUM_LOCAL_EVENTS, NUM_BUCKET_EVENTS, NUM_SAVE_EVENTS, NUM_PUSH_EVENTS = 700, 300, 120, 80
ACTS = ("SIGKILL", "SIGKILL", "later", "later", "SIGTERM", "SIGINT", "full", "broken", "refused")  # on this machine


class Worker:
    """The process that runs commands, and what they said."""

    def __init__(self, process: subprocess.Popen[str], said: Path) -> None:
        self._process, self.said = process, said
        self.written: list[tuple[str, int, int]] = []  # by the last command: file, first byte, end

    def run(self, *args: object, **what: Any) -> tuple[int, int]:
        """Return a command's exit code and the number of changes that it made to a disk."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"args": [str(arg) for arg in args], "said": str(self.said), "act": "", "at": -1, **what}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        lines = Path(f"{self.said}.written").read_text().splitlines()
        self.written = [(str(name), int(begin), int(end)) for name, begin, end in map(json.loads, lines)]
        return answer["code"], answer["changes"]


@contextmanager
def start_worker(said: Path, environment: Mapping[str, str], *args: str) -> Iterator[Worker]:
    """Run the worker until the block ends."""
    command = [sys.executable, "tests/process/event_worker.py", *args]
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**own, **environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Worker(process, said)
        assert process.stdin is not None
        process.stdin.close()


def acts_of(seed: int, operations: Sequence[str], chance: random.Random, acts: Sequence[Any] = ACTS) -> list[Any]:
    """Return one act or two; with the seed, each operation has each act as its first in turn."""
    first = acts[sum(divmod(seed, len(operations))) % len(acts)]
    return [first, chance.choice(acts)][: chance.randint(1, 2)]


def chunks_of(num_events: int, num_sampled: int, num_together: int) -> list[Any]:
    """Return ranges of seeds: a sample, and the rest in slow chunks."""
    starts = range(num_sampled, num_events, num_together)
    rest = (range(first, min(first + num_together, num_events)) for first in starts)
    slow = (pytest.param(seeds, id=str(seeds[0]), marks=pytest.mark.slow) for seeds in rest)
    return [pytest.param(range(num_sampled), id="sample"), *slow]


@contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """Make a folder, and remove it and all in it when the block has ended well."""
    folder.mkdir()
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


def is_planted(name: str) -> bool:
    """Whether a path is of `tests.sentinels.plant_in`."""
    first = name.split("/")[0]
    kinds = ("notes.txt", "thesis.pdf", ".git", "nested", "dangling", "pipe")
    return first.startswith(("name with", "read", "link")) or first in kinds
