"""apply: bring a folder of weights to a version of a chain, whole and verified at any moment.

# Note [Switching to new weights]
New shards get names of their own, with the version in them, and are written, hashed and compared with their digests in
`.cache/reshard/new` below the folder. Then a record, `switch.json`, says what moves where and what is removed: from
there on the switch is carried out, by this process or, if it is killed, by the next `apply`. Shards are moved beside
the old ones, and a rename of the index lists the new ones in one step. So at any moment readers find the old weights or
the new ones, never a mixture: not even those that take every shard which the index does not exclude. Where auxiliary
files changed too, the folder has no index while they are replaced. A lone `model.safetensors`, which readers prefer to
an index, is removed after the index is there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.digest import DigestTable, digest_bytes
from manifests.errors import OutputError, Parameter, ShardError, SourceError
from manifests.index import INDEX_NAME, MAX_SHARD_NBYTES, split_by_size
from manifests.invariants import MANIFEST_NAME
from manifests.jsontext import parse_json_object
from manifests.paths import root_shard_path
from manifests.safetensors import read_header
from manifests.store import read_small_file, sync_folder, write_file
from reshard.copy.destination import check_unchanged
from reshard.copy.engine import WriteOptions, hash_tensors, write_shards
from reshard.copy.journal import Journal, plan_key
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import ByteCounter, Progress, counting
from reshard.formats.delta.chain import Chain, Version, open_versions, state_digest
from reshard.formats.delta.codec import check_packages
from reshard.formats.delta.read import follow, open_version, with_header_digests
from reshard.formats.huggingface.read import open_checkpoint as open_folder
from reshard.formats.huggingface.weight_map import read_shard_index
from reshard.formats.table import OpenOptions
from reshard.plans.pack_plan import OutputShard, lay_out_readable, lay_out_shard
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, as_objects, check_digest
from reshard.tensors.comparison import are_of_one_kind
from reshard.tensors.lazy import stored_nbytes
from stores.base import Blocks, read_whole
from stores.bundles import TensorAt
from stores.folders.lock import locking
from stores.local import LocalFolder

_SINGLE_NAME = "model.safetensors"
_OF_VERSION = re.compile(r"\.v\d{6,}(?:_\d+)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyResult:
    """The version that a folder has now, and had `before`; None: it was empty.

    `is_recorded`: the chain has the digest of the whole state, as chains of others have not.

    Units: bytes written to shards, and read of the folder and the chain, headers apart; seconds for the verification of
    tensors that stayed as they were.
    """

    location: str
    number: int
    before: int | None
    state: str | None
    is_recorded: bool
    num_tensors: int
    num_changed: int
    write_nbytes: int
    read_nbytes: int
    verified_nbytes: int
    verify_s: float


def apply_delta(
    chain: str | Path,
    to: str | Path,
    *,
    version: int | None = None,
    quick: bool = False,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> ApplyResult:
    """Bring a folder to a version of a chain, the newest by default, in one pass over the tensors that differ.

    The folder is empty, has a Hugging Face model that is a state of the chain, or was written by this function. A
    version before its own is read from the chain's full version. Every byte is verified, also of tensors that stay as
    they were, unless `quick`, before the folder's index lists it. After a kill at any moment the folder has the old
    weights, the new ones or no index, and the next call finishes: see Note [Switching to new weights].

    Units: bytes; progress is called with bytes done and bytes in total.
    Raises:
        SourceError: the folder has none of the chain's states (`source.other-base`), or the chain is damaged.
        ShardError: a tensor of the folder is damaged.
        OutputError: there is no space for the shards that change, or the folder has other files.
        LaunchError: another process applies to this folder.

    Example:
        >>> reshard.publish_delta("model", "chain").number, reshard.apply_delta("chain", "served").number
        (1, 1)
    """
    check_packages()
    opened = open_versions(chain)
    wanted = opened.version(opened.numbers[-1] if version is None else version)
    number = wanted.number
    folder, work = Path(to), _Work(Path(to))
    work.create()
    with locking(work.folder / "lock", str(folder), "reshard delta apply"):
        work.switch()
        present, before, hashed = _present(folder)
        target, before = _target(opened, number, present, before)
        plan = _plan(folder, target, present, number)
        if not quick:
            plan = replace(plan, to_verify=[tensor for tensor in plan.unchanged if tensor.name not in hashed])
        _check_space(folder, plan.shards)
        return _carry_out(plan, target, work, wanted, before, parallelism or Parallelism(), progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The shards to write and the shard of each tensor in the new index; `unchanged` tensors stay where they are."""

    shards: Sequence[OutputShard]
    weight_map: Mapping[str, str]
    unchanged: Sequence[TensorAt]
    to_verify: Sequence[TensorAt] = ()
    auxiliary: Sequence[AuxiliaryAt]
    removed: Sequence[str]
    num_changed: int


def _present(folder: Path) -> tuple[Checkpoint | None, int | None, Collection[str]]:
    """Return the weights of a folder, with digests, the version that its index names, and which tensors were hashed.

    Raises:
        OutputError: it has other files, or a manifest.
    """
    if (folder / MANIFEST_NAME).exists():
        problem = f"has a {MANIFEST_NAME}, which would no longer be true"
        hint = "apply to a Hugging Face folder: reshard export MANIFEST --to hf --out DIR"
        raise OutputError(str(folder), problem, hint, code="output.has-manifest")
    if not ((folder / INDEX_NAME).is_file() or (folder / _SINGLE_NAME).is_file()):
        if others := sorted(name for name in os.listdir(folder) if name != ".cache"):
            problem = f"has other files than a model's: {others[0]}"
            hint = "choose an empty folder, or one with the weights of a version"
            raise OutputError(str(folder), problem, hint, code="output.not-ours")
        return None, None, ()
    opened = with_header_digests(open_folder(LocalFolder(folder), OpenOptions()))
    unknown = [tensor for tensor in opened.tensors.values() if tensor.blake3 is None]
    digests = DigestTable.of(hash_tensors(unknown))
    hashed = {tensor.name: replace(tensor, blake3=digests.raw(at)) for at, tensor in enumerate(unknown)}
    number = None
    if (folder / INDEX_NAME).is_file():
        where = folder / INDEX_NAME
        metadata = read_shard_index(read_small_file(where), str(where), {}).metadata
        text = str(metadata.get("version")) if isinstance(metadata, dict) else ""
        number = int(text) if re.fullmatch(r"\d{1,12}", text) else None
    return replace(opened, tensors={**as_objects(opened.tensors), **hashed}), number, hashed.keys()


def _target(chain: Chain, number: int, present: Checkpoint | None, before: int | None) -> tuple[Checkpoint, int | None]:
    """Return a version as it is computed from the folder's, if that is possible, or else from the chain's full one.

    Raises:
        SourceError: the folder has none of the chain's states.
    """
    if present is None:
        return open_version(chain, number), None
    state = state_digest(present.tensors.values())
    before = _number_of(chain, state, before)
    if before is None:
        newest = chain.version(chain.numbers[-1])
        problem = f"is none of the states of {chain}: expected {newest.state} (version {newest.number}), found {state}"
        hint = "apply to an empty folder, or to one with the base of the chain"
        raise SourceError(present.location, problem, hint, code="source.other-base")
    if before == number:
        return present, before
    line = chain.line(number, after=before) if before < number else []
    if line and line[0].base == before:
        return follow(present, chain, line), before
    return open_version(chain, number), before


def _number_of(chain: Chain, state: str | None, number: int | None) -> int | None:
    """Return the version that has a state: the one of that number, if it does, or another one, or the first one's base.

    A chain of others records no states: the folder's number is taken as it is, and 0 without one.
    """
    if number in chain.numbers and chain.version(number).state == state:
        return number
    versions = chain.versions()
    if all(version.state is None and version.base_state is None for version in versions):
        return number or 0
    for version in reversed(versions):
        if version.state == state:
            return version.number
    first = versions[0]
    return first.base if first.base_state == state else None


def _plan(folder: Path, target: Checkpoint, present: Checkpoint | None, number: int) -> _Plan:
    """Plan the shards that change, each with all of its tensors, or new ones if the tensors are others."""
    here: Mapping[str, TensorAt] = {} if present is None else present.tensors
    tensors = dict(as_objects(target.tensors))
    changed = set()
    for name, tensor in tensors.items():
        if (same := here.get(name)) is not None and are_of_one_kind(same, tensor) and same.blake3 == tensor.blake3:
            tensors[name] = same
        else:
            changed.add(name)
    if here.keys() == tensors.keys() and all(are_of_one_kind(here[name], tensors[name]) for name in here):
        groups: dict[str, list[TensorAt]] = {}
        for name, tensor in here.items():
            groups.setdefault(Path(str(tensor.file)).name, []).append(tensors[name])
    else:
        runs = split_by_size(tensors.values(), lambda tensor: tensor.nbytes, MAX_SHARD_NBYTES)
        readable = [shard for run in runs for shard in lay_out_readable(run)]
        groups = {root_shard_path(at, len(readable)): [*shard.origins] for at, shard in enumerate(readable)}
        changed = set(tensors)
    names = {Path(str(tensor.file)).name for tensor in here.values()}
    shards, unchanged, weight_map = list[OutputShard](), list[TensorAt](), dict[str, str]()
    for path, origins in groups.items():
        if changed.isdisjoint(origin.name for origin in origins):
            unchanged += origins
            weight_map |= {origin.name: path for origin in origins}
            continue
        new = _versioned(path, number, names)
        shards.append(lay_out_shard(new, origins))
        weight_map |= {origin.name: new for origin in origins}
    listed = set(weight_map.values())
    return _Plan(
        shards=shards,
        weight_map=weight_map,
        unchanged=unchanged,
        auxiliary=[item for item in target.auxiliary if _differs(folder / item.path, item)],
        removed=sorted(names - listed),
        num_changed=len(changed),
    )


def _versioned(path: str, number: int, taken: set[str]) -> str:
    stem = _OF_VERSION.sub("", path.removesuffix(".safetensors"))
    name, again = f"{stem}.v{number:06d}.safetensors", 1
    while name in taken:
        name, again = f"{stem}.v{number:06d}_{again}.safetensors", again + 1
    return name


def _differs(path: Path, item: AuxiliaryAt) -> bool:
    """Return whether a file of the folder is not the auxiliary file of a version."""
    if not path.is_file():
        return True
    return digest_bytes(read_small_file(path)) != (item.digest or digest_bytes(read_whole(item.file)))


def _check_space(folder: Path, shards: Sequence[OutputShard]) -> None:
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(folder).free
    if needed > free:
        problem = f"the disk has {free} bytes free, expected at least {needed}, for the shards that change"
        raise OutputError(str(folder), problem, f"choose another disk for {Parameter('to')}", code="output.disk-full")


def _carry_out(
    plan: _Plan,
    target: Checkpoint,
    work: _Work,
    version: Version,
    before: int | None,
    parallelism: Parallelism,
    progress: Progress | None,
) -> ApplyResult:
    write_nbytes = sum(origin.nbytes for shard in plan.shards for origin in shard.origins)
    number, verified_nbytes = version.number, sum(tensor.nbytes for tensor in plan.to_verify)
    counter = counting(progress, write_nbytes + verified_nbytes)
    begin = time.monotonic()
    _verify(plan.to_verify, counter)
    verify_s = time.monotonic() - begin
    changes = plan.shards or plan.auxiliary or before != number
    digests = work.write(plan, WriteOptions(progress=counter, parallelism=parallelism)) if changes else {}
    state = state_digest(
        replace(tensor, blake3=digests.get(name, tensor.blake3)) for name, tensor in target.tensors.items()
    )
    if changes:
        metadata = {"total_size": sum(tensor.nbytes for tensor in target.tensors.values()), "version": f"{number:06d}"}
        index = {"metadata": {**metadata, **({"state": state} if state else {})}, "weight_map": dict(plan.weight_map)}
        check_unchanged(plan.shards, plan.auxiliary)
        work.prepare(index, plan)
        work.switch()
    return ApplyResult(
        location=str(work.target),
        number=number,
        before=before,
        state=state,
        is_recorded=version.state is not None,
        num_tensors=len(target.tensors),
        num_changed=plan.num_changed,
        write_nbytes=sum(shard.nbytes for shard in plan.shards),
        read_nbytes=sum(stored_nbytes(origin) for shard in plan.shards for origin in shard.origins) + verified_nbytes,
        verified_nbytes=verified_nbytes,
        verify_s=verify_s,
    )


def _verify(tensors: Sequence[TensorAt], progress: ByteCounter) -> None:
    """Compare tensors that stay as they are with their digests.

    Raises:
        ShardError: one is damaged.
    """
    for tensor, digest in zip(tensors, hash_tensors(tensors, progress), strict=True):
        try:
            check_digest(tensor, digest)
        except ShardError as error:
            raise error.changed(hint="apply to an empty folder, or copy the file again") from None


@dataclass(frozen=True, slots=True)
class _Work:
    """What is under construction for a folder; see Note [Switching to new weights]."""

    target: Path

    @property
    def folder(self) -> Path:
        return self.target / ".cache/reshard"

    @property
    def new(self) -> Path:
        return self.folder / "new"

    @property
    def record(self) -> Path:
        return self.folder / "switch.json"

    def create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, plan: _Plan, options: WriteOptions) -> dict[str, bytes]:
        """Write the new shards, resuming an interrupted run of the same plan; return the digests of their tensors."""
        journal = Journal(self.new, plan_key(plan.shards), self.folder / "journal")
        if not journal.is_begun:
            shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(exist_ok=True)
        journal.begin()
        write_shards(plan.shards, self.new, replace(options, journal=journal))
        digests: dict[str, bytes] = {}
        for shard in plan.shards:
            header = read_header(self.new / shard.path)
            digests |= zip(header.tensors.names, map(bytes.fromhex, header.digest_table(shard.path)), strict=True)
        for item in plan.auxiliary:
            path = self.new / item.path
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, Blocks(item.file, item.digest))
        return digests

    def prepare(self, index: Mapping[str, object], plan: _Plan) -> None:
        """Record the switch, which is carried out from here on."""
        write_file(self.new / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())
        record = {
            "shards": [shard.path for shard in plan.shards],
            "auxiliary": [item.path for item in plan.auxiliary],
            "removed": list(plan.removed),
        }
        sync_folder(self.new)
        write_file(self.record, json.dumps(record).encode())

    def switch(self) -> None:
        """Carry out the switch that is recorded, if there is one, from wherever it was interrupted."""
        if not self.record.is_file():
            return
        record = parse_json_object(read_small_file(self.record), str(self.record))
        self._move(record["shards"])
        if record["auxiliary"]:
            if (self.new / INDEX_NAME).exists():
                self._remove([INDEX_NAME, *record["removed"]])
            self._move(record["auxiliary"])
        self._move([INDEX_NAME])
        self._remove(record["removed"])
        shutil.rmtree(self.new, ignore_errors=True)
        (self.folder / "journal").unlink(missing_ok=True)
        self.record.unlink()

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
