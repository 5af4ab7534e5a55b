"""The journal of an output under construction: one line for each run of tensors that was written."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from manifests.digest import Hasher
from manifests.store import write_file
from reshard.plans.pack_plan import OutputShard
from stores.base import LOCK_NAME, PART_NAME, PROGRESS_NAME
from stores.folders.owned import RECORD_NAME

JOURNAL_NAME = RECORD_NAME


def is_working_name(path: str) -> bool:
    """Whether a path is reserved for files under construction: an auxiliary file of that name would be lost."""
    name = path.rpartition("/")[2]
    return path in (JOURNAL_NAME, LOCK_NAME, PART_NAME, PROGRESS_NAME) or (
        name.startswith(".") and name.endswith(".partial")
    )


def plan_key(shards: Sequence[OutputShard]) -> str:
    """Return a digest of everything that determines the bytes to write, the source's fingerprint included."""
    hasher = Hasher()
    files = dict.fromkeys(origin.file for shard in shards for origin in shard.origins)
    numbers = {file: number for number, file in enumerate(files)}
    hasher.update(json.dumps([(str(file), file.fingerprint) for file in files]).encode())
    for shard in shards:
        ranges = [(numbers[origin.file], origin.begin, origin.nbytes) for origin in shard.origins]
        hasher.update(json.dumps([shard.path, shard.header_nbytes, ranges]).encode())
        hasher.update(shard.header)
    return hasher.hexdigest()


class Journal:
    """Lines of an interrupted run of the same plan, and new ones as tensors are written.

    It is about outputs below `folder`, and is located there itself unless `path` says otherwise. Lines must be
    verified against the bytes on disk: after a power failure they may be ahead of them.
    """

    def __init__(self, folder: Path, key: str, path: Path | None = None) -> None:
        self.folder, self.path, self._key = folder, path or folder / JOURNAL_NAME, key
        self._lock = threading.Lock()
        self._done = self._read()

    @property
    def is_begun(self) -> bool:
        """Whether there is a journal of an interrupted run of this plan."""
        return self._done is not None

    @property
    def has_work(self) -> bool:
        """Whether that run can be resumed: its journal has at least one line."""
        return bool(self._done)

    def begin(self, names: Collection[str] = ()) -> None:
        """Start the journal, keeping the lines of an interrupted run of the same plan.

        In the folder itself, it is also the record of the `names` that are written there, see `stores.folders.owned`.
        """
        lines = b"" if self._done is None else self.path.read_bytes().partition(b"\n")[2]
        header = {"plan": self._key, "names": sorted(names)}  # of this run: auxiliary files are not of the plan
        write_file(self.path, (json.dumps(header) + "\n").encode() + lines)
        self._done = self._done or {}

    def digests(self, output: str, position: int) -> list[str] | None:
        """Return the hex digests of the run that begins at `position` of a shard, if it was written."""
        return (self._done or {}).get((output, position))

    def record(self, output: str, position: int, digests: list[str]) -> None:
        line = json.dumps({"output": output, "position": position, "digests": digests})
        with self._lock, open(self.path, "a") as file:
            file.write(line + "\n")

    def forget(self) -> None:
        """Remove the journal: its outputs cannot be resumed."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[tuple[str, int], list[str]] | None:
        done: dict[tuple[str, int], list[str]] = {}
        try:
            with open(self.path) as lines:
                if json.loads(next(lines, "{}"))["plan"] != self._key:
                    return None
                for line in lines:
                    with suppress(ValueError, KeyError, TypeError):  # truncated by the interrupt
                        entry = json.loads(line)
                        done[entry["output"], entry["position"]] = list(entry["digests"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return done
