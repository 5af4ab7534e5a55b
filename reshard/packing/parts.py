"""A pack in parts: processes on any machines each write some of the shards, and a commit publishes all of them.

# Note [Parts]
A part is a set of whole shards, which the plan settles, and an output by itself: `parts-KEY/part-I-of-N`, where KEY is
of the plan. It is locked, resumed and completed like any other output; its last file is a record of its shards, and
part 1 has the auxiliary files, too. A commit needs nothing but the records. Of a folder, the parts are in `.NAME.parts`
beside it, and the commit moves their files; in a bucket they are below the prefix and stay there: the manifest names
them. A part that was lost is run again by whoever scheduled it, here or on another machine: it keeps what is verified.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manifests.codec import decode_manifest, encode_manifest
from manifests.digest import PREFIX, digest_bytes
from manifests.errors import InputError, OutputError, Parameter, SourceError, UnreachableError
from manifests.invariants import SOURCE_NAME, check_manifest
from manifests.jsontext import parse_json_object
from manifests.paths import problem_with_path
from manifests.schema import Manifest, Shard
from manifests.store import read_small_file
from reshard.copy.destination import check_unchanged, open_target
from reshard.copy.engine import WriteOptions, WrittenShard
from reshard.copy.journal import plan_key
from reshard.packing.bundles import Written, build_manifest, copy_auxiliary_files, refer_to_others
from reshard.packing.options import PackOptions, PackResult, Part, shards_of_part
from reshard.packing.parts_place import OF_PART, BucketParts, FileFacts, FolderParts, Merged, PartsPlace
from reshard.plans.pack_plan import OutputShard, PackPlan
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.checksums import verify_records
from reshard.transforms.casts import check_stored_ties
from stores.address import is_url, output_address
from stores.base import PART_NAME
from stores.open import Address

_BLANK = f"{PREFIX}{'0' * 64}"
_POLL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The shards of all parts, the manifest without digests and auxiliary files, and the key of both."""

    checkpoint: Checkpoint
    shards: Sequence[OutputShard]
    draft: Manifest
    key: str

    @property
    def folder(self) -> str:
        return f"parts-{self.key.removeprefix(PREFIX)[:12]}"


def write_part(
    checkpoint: Checkpoint, plan: PackPlan, part: Part, options: PackOptions, stages: Collection[int] | None = None
) -> None:
    """Write one part of the shards of these stages (None: of all), and a record of it; see Note [Parts].

    A part that was killed is resumed, and one that is complete is kept.
    """
    work = _plan(checkpoint, plan, part, stages)
    place, where = _open_place(options.out, force=options.force), f"{work.folder}/{part.name}"
    if not place.check_free(work.folder, {item.path for item in checkpoint.auxiliary} | {SOURCE_NAME}):
        return
    files = place.files()
    if others := _folders_in(files) - {work.folder}:
        raise _other_plan(place, others)
    if f"{where}/{PART_NAME}" in files:
        with suppress(OutputError):  # a record that is damaged, as its part may be
            if not _missing_files(where, _read_record(place, where), files):
                return
        place.remove(where)
    _write(work, part, place.address(where), options.write)


def _write(work: _Plan, part: Part, where: Address, options: WriteOptions) -> None:
    checkpoint, shards = work.checkpoint, shards_of_part(work.shards, part)
    names = {shard.path for shard in shards}
    if part.number == 1:
        names |= {SOURCE_NAME, *(item.path for item in checkpoint.auxiliary)}
    # The scheduler runs a part once at a time: who was at it before, perhaps on a machine that is lost, has ended.
    wanted = {PART_NAME, *names}
    with open_target(where, shards, force=True, find_owned=_files_of_part, wanted=wanted, last=PART_NAME) as target:
        record: dict[str, Any] = {"plan": work.key, "command": list(part.command)}
        if part.number == 1:
            check_stored_ties(checkpoint)
            files = copy_auxiliary_files(checkpoint, target)
            record["manifest"] = encode_manifest(replace(work.draft, files=files)).decode()
        done = target.write_shards(shards, options)
        verify_records(origin for shard in shards for origin in shard.origins)
        check_unchanged(work.shards, checkpoint.auxiliary)
        record["files"] = target.written(names)
        record["shards"] = {
            shard.path: {
                "digest": on_disk.digest,
                "names": [origin.name for origin in shard.origins] if shard.is_indexed else None,
                "data_nbytes": sum(origin.nbytes for origin in shard.origins),
            }
            for shard, on_disk in zip(shards, done, strict=True)
        }
        target.commit(PART_NAME, json.dumps(record).encode())


def commit(out: str | Path, *, force: bool = False, wait: bool = False) -> PackResult:
    """Merge the parts that `pack` has written with `part` into one checkpoint; no tensors are copied.

    `out` is the folder or the object-store URL that the parts were packed to. `force` replaces an existing folder in
    one step; it is not supported in a bucket. With `wait`, return once all parts are there. It can be interrupted at
    any point and called again: a checkpoint that is committed is returned as it is. With `force`, call it once a part
    has begun; before that, the old checkpoint is returned.

    Raises:
        OutputError: parts are missing (`output.missing-parts`, `output.no-parts`) or damaged, or of another plan, or
            `out` exists or cannot be written.
        InputError: files were changed since their parts wrote them.
        UsageError: `force` and a bucket.

    Example:
        >>> for number in (1, 2):
        ...     part = reshard.pack("model", "model-parts", "pp=2", part=f"{number}/2")
        >>> reshard.commit("model-parts").num_stages
        2
    """
    address = output_address(out)
    place = _open_place(address, force=force)
    while True:
        files = place.files()
        folders = _folders_in(files)
        try:
            manifest = place.committed(folders) or place.publish(_merge(place, files, folders))
            return PackResult(committed=manifest, out=address)
        except OutputError as error:
            if not wait or error.code not in ("output.missing-parts", "output.no-parts"):
                raise
        time.sleep(_POLL_S)


def _open_place(out: Address, *, force: bool) -> PartsPlace:
    return BucketParts(out, force=force) if is_url(out) else FolderParts(Path(out), force=force)


def _plan(checkpoint: Checkpoint, plan: PackPlan, part: Part, stages: Collection[int] | None) -> _Plan:
    """Return the plan of a pack in as many parts as `part` is one of."""
    shards, references = plan.shards_on(stages), refer_to_others(checkpoint, plan, stages)
    unread = {shard.path: WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=_BLANK) for shard in shards}
    draft = build_manifest(checkpoint, plan, Written(unread, references, ()))
    auxiliary = json.dumps([(item.path, item.file.fingerprint, item.digest) for item in checkpoint.auxiliary]).encode()
    key = digest_bytes(f"{plan_key(shards)} {part.of} ".encode() + encode_manifest(draft) + auxiliary)
    return _Plan(checkpoint=checkpoint, shards=shards, draft=draft, key=key)


def _merge(place: PartsPlace, files: Mapping[str, FileFacts], folders: Collection[str]) -> Merged:
    """Return what all parts have written."""
    if not folders:
        hint = f"pack them first, with {Parameter('part')}"
        raise OutputError(place.where, "there are no packed parts to commit", hint, code="output.no-parts")
    if len(folders) > 1:
        raise _other_plan(place, folders)
    (folder,) = folders
    of = next(int(match["of"]) for match in map(OF_PART.fullmatch, files) if match)
    parts = [Part(number=number, of=of) for number in range(1, of + 1)]
    records = {
        part: _read_record(place, f"{folder}/{part.name}")
        for part in parts
        if f"{folder}/{part.name}/{PART_NAME}" in files
    }
    if missing := [part for part in parts if part not in records]:
        numbers = ", ".join(str(part.number) for part in missing)
        command: list[str] = next((record["command"] for record in records.values()), [])
        again = f"{missing[0].number}/{of}"
        hint = (
            f"run {shlex.join([*command, '--part', again])}"
            if command
            else f"pack again with {Parameter('part', again)}"
        )
        problem = f"part{'s' if len(missing) > 1 else ''} {numbers} of {of} not finished"
        raise OutputError(place.where, problem, hint, code="output.missing-parts")
    for part, record in records.items():
        if damaged := _missing_files(f"{folder}/{part.name}", record, files):
            problem, hint = "is not the file that a part has written", f"run part {part.number}/{of} again"
            raise OutputError(f"{place.address(damaged[0])}", problem, hint, code="output.damaged-parts")
    return _merged(folder, records)


def _merged(folder: str, records: Mapping[Part, Mapping[str, Any]]) -> Merged:
    shards = {path: shard for record in records.values() for path, shard in record["shards"].items()}
    indexed = {path: shard for path, shard in shards.items() if shard["names"] is not None}
    draft = decode_manifest(next(iter(records.values()))["manifest"].encode(), f"{folder}/{PART_NAME}")

    def complete(shard: Shard) -> Shard:
        return replace(shard, digest=shards[shard.path]["digest"])

    stages = (replace(stage, shards=tuple(map(complete, stage.shards))) for stage in draft.stages)
    manifest = replace(draft, stages=tuple(stages))
    check_manifest(manifest)
    return Merged(
        folder=folder,
        manifest=manifest,
        folder_of={path: f"{folder}/{part.name}" for part, record in records.items() for path in record["files"]},
        indexed={shard.path: indexed[shard.path]["names"] for shard in manifest.shards if shard.path in indexed},
        data_nbytes=sum(shard["data_nbytes"] for shard in indexed.values()),
    )


def _missing_files(where: str, record: Mapping[str, Any], files: Mapping[str, FileFacts]) -> list[str]:
    """Return the files of a part that are not as its record says."""

    def is_same(path: str, nbytes: int, etag: str) -> bool:
        found_nbytes, found_etag = files.get(f"{where}/{path}", (-1, ""))
        return found_nbytes == nbytes and (not etag or not found_etag or found_etag == etag)

    return [f"{where}/{path}" for path, facts in record["files"].items() if not is_same(path, *facts)]


def _files_of_part(folder: Path) -> Collection[str] | None:
    """Return the paths that a complete part's record lists, its own included; None if it cannot be read."""
    path = folder / PART_NAME
    try:
        return {PART_NAME, *parse_json_object(read_small_file(path), str(path))["files"]}
    except UnreachableError:
        raise
    except (InputError, KeyError, TypeError):
        return None


def _read_record(place: PartsPlace, where: str) -> dict[str, Any]:
    """Read what a complete part has recorded."""
    path = f"{place.address(where)}/{PART_NAME}"
    data, damaged = place.load(f"{where}/{PART_NAME}"), "is not the record of a part"
    try:
        record = parse_json_object(data, path)
    except SourceError as error:
        raise OutputError(path, damaged, "run its part again", code="output.damaged-parts") from error
    if not _is_record(record):
        raise OutputError(path, damaged, "run its part again", code="output.damaged-parts")
    return record


def _is_record(record: Mapping[str, Any]) -> bool:
    command, files, shards = record.get("command"), record.get("files"), record.get("shards")
    if not isinstance(command, list) or not isinstance(files, dict) or not isinstance(shards, dict):
        return False
    return (
        all(isinstance(word, str) for word in command)
        and all(problem_with_path(path) is None and _are_facts(facts) for path, facts in files.items())
        and all(path in files and _is_shard(shard) for path, shard in shards.items())
        and isinstance(record.get("manifest", ""), str)
        and ("manifest" in record) == (SOURCE_NAME in files)  # both are of part 1
    )


def _are_facts(facts: object) -> bool:
    return isinstance(facts, list) and len(facts) == 2 and type(facts[0]) is int and isinstance(facts[1], str)


def _is_shard(shard: object) -> bool:
    if not isinstance(shard, dict) or not isinstance(shard.get("digest"), str):
        return False
    names = shard.get("names", ...)
    is_listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return (names is None or is_listed) and type(shard.get("data_nbytes")) is int


def _folders_in(names: Iterable[str]) -> set[str]:
    return {match["folder"] for match in map(OF_PART.fullmatch, names) if match}


def _other_plan(place: PartsPlace, folders: Collection[str]) -> OutputError:
    named = ", ".join(str(place.address(folder)) for folder in sorted(folders))
    return OutputError(
        place.where,
        "parts here have another plan: their source, its path or time, layout, number of parts or reshard version "
        f"differs ({named})",
        "run all parts with the same arguments and one copy of the source, and remove those of the other plan",
        code="output.other-plan",
    )
