"""What an interrupted run had done: one line for each run of tensors that is on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from manifests.digest import Hasher
from reshard.plans.pack_plan import OutputShard
from stores.objects import LOCK_NAME, PROGRESS_NAME

__all__ = ["JOURNAL_NAME", "Journal", "is_working_name", "plan_key"]

JOURNAL_NAME = ".journal"


def is_working_name(path: str) -> bool:
    """Tell the names that files have while an output takes shape: a small file of one of them would be lost."""
    name = path.rpartition("/")[2]
    return path in (JOURNAL_NAME, LOCK_NAME, PROGRESS_NAME) or (name.startswith(".") and name.endswith(".partial"))


def plan_key(shards: Sequence[OutputShard]) -> str:
    """Give a digest of everything that decides the bytes to be written, the state of the source included."""
    hasher = Hasher()
    files = dict.fromkeys(origin.file for shard in shards for origin in shard.origins)
    numbers = {file: number for number, file in enumerate(files)}
    hasher.update(json.dumps([(str(file), file.fingerprint) for file in files]).encode())
    for shard in shards:
        ranges = [(numbers[origin.file], origin.begin, origin.nbytes) for origin in shard.origins]
        header = shard.header
        hasher.update(json.dumps([shard.path, len(header), ranges]).encode())
        hasher.update(header)
    return hasher.hexdigest()


class Journal:
    """Lines of an earlier run of the same plan, and new ones as runs of tensors are done.

    It speaks of outputs below `folder`, and lies there itself unless `path` says where.
    A line is a claim, to be checked against the bytes: after a power cut it may be ahead of them.
    """

    def __init__(self, folder: Path, key: str, path: Path | None = None) -> None:
        self.folder, self.path, self._key = folder, path or folder / JOURNAL_NAME, key
        self._lock = threading.Lock()
        self._done = self._read()

    @property
    def is_begun(self) -> bool:
        """Whether an earlier run of this very plan has left its work here."""
        return self._done is not None

    @property
    def has_work(self) -> bool:
        """Whether that run has anything to resume from: at least one line."""
        return bool(self._done)

    def begin(self) -> None:
        """Start the journal, keeping the lines of an earlier run of the same plan."""
        if self._done is None:
            self.path.write_text(json.dumps({"plan": self._key}) + "\n")
            self._done = {}

    def digests(self, output: str, position: int) -> list[str] | None:
        """Give the hex digests of the run that begins at `position` of a shard, if it was done."""
        return (self._done or {}).get((output, position))

    def record(self, output: str, position: int, digests: Sequence[str]) -> None:
        line = json.dumps({"output": output, "position": position, "digests": list(digests)})
        with self._lock, open(self.path, "a") as file:
            file.write(line + "\n")

    def forget(self) -> None:
        """Remove the journal: nobody is to resume from what it says."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[tuple[str, int], list[str]] | None:
        try:
            lines = self.path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return None
        done: dict[tuple[str, int], list[str]] = {}
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
                if number == 0:
                    if entry["plan"] != self._key:
                        return None
                else:
                    done[entry["output"], entry["position"]] = entry["digests"]
            except (ValueError, KeyError, TypeError):  # a line that the kill cut short
                if number == 0:
                    return None
        return done if lines else None
