"""New weights under construction in a folder, and the switch to them.

# Note [Switching to new weights]
New shards get names of their own, with the version in them, and are written, hashed and compared with their digests in
`.cache/reshard/new` below the folder. Then a record, `switch.json`, says what moves where and what is removed: from
there on the switch is carried out, by this process or, if it is killed, by the next `apply`. Shards are moved beside
the old ones, and a rename of the index lists the new ones in one step. So at any moment readers find the old weights or
the new ones, never a mixture: not even those that take every shard which the index does not exclude. Where auxiliary
files changed too, the index names a file that is not there while they are replaced or removed: without an index, some
would take shards of both versions, or `pytorch_model.bin`, which is of neither. A lone `model.safetensors`, which has
no index, and which others prefer to one, is beside such an index until the new one is there, and removed then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from manifests.errors import OutputError
from manifests.index import INDEX_NAME
from manifests.jsontext import parse_json_object
from manifests.paths import problem_with_path
from manifests.safetensors import read_header
from manifests.store import read_small_file, sync_folder, write_file
from reshard.copy.destination import FolderTarget, copy_files
from reshard.copy.engine import WriteOptions, write_shards
from reshard.copy.journal import Journal, plan_key
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import AuxiliaryAt
from stores.folders.lock import locking

_CLOSED_NAME = "closed.index.json"
_CLOSED = json.dumps(
    {"metadata": {}, "weight_map": {"": "interrupted-switch.run-reshard-delta-apply-again.safetensors"}}
).encode()


class Work:
    """What is under construction for a folder; see Note [Switching to new weights]."""

    def __init__(self, target: Path) -> None:
        self.target, self.folder = target, target / ".cache/reshard"
        self.new, self.record = self.folder / "new", self.folder / "switch.json"
        self.deltas = self.folder / "deltas"  # copies of the deltas of a chain that is elsewhere

    @property
    def nbytes(self) -> int:
        """What an interrupted run has written, on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.new.rglob("*"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locking(self.folder / "lock", str(self.target), "reshard delta apply"):
            yield

    def write(
        self, shards: Sequence[OutputShard], auxiliary: Sequence[AuxiliaryAt], options: WriteOptions
    ) -> dict[str, str]:
        """Write the new shards, resuming an interrupted run of the same plan; return the digests of their tensors."""
        journal = Journal(self.new, plan_key(shards), self.folder / "journal")
        if not journal.is_begun:
            shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(exist_ok=True)
        journal.begin()
        write_shards(shards, self.new, replace(options, journal=journal))
        digests: dict[str, str] = {}
        for shard in shards:
            digests |= read_header(self.new / shard.path).digests(shard.path)
        copy_files(auxiliary, FolderTarget(self.new))
        return digests

    def prepare(self, index: Mapping[str, object], record: Mapping[str, Sequence[str]]) -> None:
        """Record the switch: the `shards` and `auxiliary` files that are moved, and those that are `removed`."""
        write_file(self.new / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())
        write_file(self.new / _CLOSED_NAME, _CLOSED)
        sync_folder(self.new)
        write_file(self.record, json.dumps(record).encode())

    def switch(self) -> bool:
        """Carry out the switch that is recorded, from wherever it was interrupted; return whether there was one."""
        if not self.record.is_file():
            return False
        record = self._read_record()
        self._check_whole(record)
        has_others = not all(name.endswith(".safetensors") for name in (*record["auxiliary"], *record["removed"]))
        if has_others or not (self.target / INDEX_NAME).exists():
            with suppress(FileNotFoundError):  # closed before the interrupt
                os.replace(self.new / _CLOSED_NAME, self.target / INDEX_NAME)
            sync_folder(self.target)
        if has_others:
            if (self.new / INDEX_NAME).exists():
                self._remove(record["removed"])
            self._move(record["auxiliary"])
        self._move(record["shards"])
        self._move([INDEX_NAME])
        self._remove(record["removed"])
        if self.new.exists():
            shutil.rmtree(self.new)
        (self.folder / "journal").unlink(missing_ok=True)
        self.record.unlink()
        return True

    def _check_whole(self, record: Mapping[str, Sequence[str]]) -> None:
        """Refuse a switch of which new files are lost: nothing would take the place of what it removes."""
        places = [self.new, self.target] if (self.new / INDEX_NAME).exists() else [self.target]  # all were moved
        names = [INDEX_NAME, *record["shards"], *record["auxiliary"]]
        lost = [name for name in names if not any((place / name).exists() for place in places)]
        if lost or (len(places) == 1 and (self.target / INDEX_NAME).read_bytes() == _CLOSED):
            problem = f"an interrupted switch cannot be finished: {(lost or names)[0]} is not in {self.new}"
            hint = "put that folder back, or apply to an empty folder"
            raise OutputError(str(self.record), problem, hint, code="output.bad-switch")

    def _read_record(self) -> dict[str, list[str]]:
        where = str(self.record)
        record = parse_json_object(read_small_file(self.record), where)
        for key in ("shards", "auxiliary", "removed"):
            names = record.get(key)
            if not isinstance(names, list) or any(not isinstance(n, str) or problem_with_path(n) for n in names):
                problem, hint = f"{key} is not a list of names below the folder", "remove the file, and apply again"
                raise OutputError(where, problem, hint, code="output.bad-switch")
        return record

    def _move(self, names: Sequence[str]) -> None:
        for name in names:
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # moved before the interrupt
                os.replace(self.new / name, self.target / name)
        sync_folder(self.target)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.target / name).unlink(missing_ok=True)
        sync_folder(self.target)
