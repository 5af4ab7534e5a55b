"""A pack in parts: processes on any machines each write a part to one folder, and a commit merges the parts.

Each part has a record beside that folder, in `.NAME.parts`: a journal while it runs, a JSON file once it is done. Parts
that are lost are taken over by those that are done, if they are asked to: see `reshard.operations.part_claims`. For
parts in a bucket see `reshard.operations.bucket_parts`.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from manifests.codec import decode_manifest, encode_manifest
from manifests.digest import digest_bytes
from manifests.errors import OutputError, refused_by_system
from manifests.index import INDEX_NAME, has_index, is_indexed
from manifests.invariants import MANIFEST_NAME, check_manifest
from manifests.owned import files_in, files_of_manifest
from manifests.publish import partial_of, publishing, sharing
from manifests.safetensors import DIGESTS_KEY, encode_header, read_header
from manifests.schema import Manifest, Shard
from manifests.store import read_manifest, write_file, write_manifest
from reshard.copy.destination import FolderTarget, check_space
from reshard.copy.direct_io import OutputFile
from reshard.copy.engine import write_tensors
from reshard.copy.journal import Journal
from reshard.copy.resumable import keep_only
from reshard.copy.unchanged import check_unchanged
from reshard.operations.pack import (
    PLAN_NAME,
    PackOptions,
    check_stored_ties,
    copy_auxiliary_files,
    index_file,
    records_folder,
)
from reshard.operations.part_claims import Claims, is_locked_for_us, locked_part
from reshard.operations.part_records import (
    COMMIT_NAME,
    begin_part,
    check_mark,
    forget_lost,
    identify,
    is_identified,
    mark_of,
    read_record,
    remove_records,
    unfinished,
)
from reshard.operations.parts_plan import PartsPlan, parts_plan
from reshard.plans.pack_plan import PackPlan
from reshard.plans.partition import Part, partition
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import MadeFile
from stores.address import is_url
from stores.base import check_whole
from stores.local import LocalFile
from stores.manifest_file import Address

__all__ = ["commit", "pack_part"]

logger = logging.getLogger(__name__)


def pack_part(
    checkpoint: Checkpoint, plan: PackPlan, part: Part, options: PackOptions, take_over_s: float | None = None
) -> tuple[Part, ...]:
    """Write one part of the bundles, and a record of it; return the other parts that were written.

    A part that was killed is resumed. Part 1 also writes the auxiliary files. With `take_over_s`, this waits until all
    parts are done, and writes those that no process has worked on for so many seconds.

    Raises:
        OutputError: another process writes this part, or the other parts are of another plan.
        InputError: as `pack`.
    """
    work = parts_plan(checkpoint, plan, part, options)
    if is_url(options.out):
        from reshard.operations.bucket_parts import pack_part_to_bucket  # clients of object stores

        return pack_part_to_bucket(work, part, take_over_s)
    out = Path(options.out)
    with sharing(out, force=options.force, find_owned=files_of_manifest) as folder, ExitStack() as stack:
        records = begin_part(out, folder, work.key, part)
        claims = Claims(records, records.parent / PLAN_NAME, take_over_s)
        if take_over_s is None:
            stack.enter_context(locked_part(records, out, part))
            is_ours = True
        else:  # another process may have taken it over
            is_ours = bool(unfinished(records, [part])) and is_locked_for_us(stack, records, out, part)
        if is_ours:
            stack.enter_context(claims.claimed(part))
            _write(work, part, folder, records)
    return () if take_over_s is None else tuple(_take_over(work, part, records, claims))


def _write(plan: PartsPlan, part: Part, folder: Path, records: Path) -> None:
    """Write a part, or what an interrupted process left to write of it, and its record."""
    pieces = partition(plan.shards, part.of)[part.number - 1]
    forget_lost(records, folder, [piece.shard for piece in pieces])
    journal = Journal(folder, plan.key, records / f"{part.name}.journal")
    if not journal.is_begun:
        check_space(sum(piece.nbytes for piece in pieces), shutil.disk_usage(folder).free, folder)
    journal.begin()
    files = None
    if part.number == 1:
        check_stored_ties(plan.checkpoint)
        files = copy_auxiliary_files(plan.checkpoint, FolderTarget(folder, is_shared=True))
    write = replace(plan.options.write, journal=journal)
    digests = {}
    for piece in pieces:
        digests[piece.shard.path] = write_tensors(piece.shard, piece.names, folder, write)
        if piece.has_start:
            _write_header(folder / piece.shard.path, piece.shard.nbytes, piece.shard.header)
    check_unchanged(plan.shards, plan.checkpoint.auxiliary)
    record: dict[str, Any] = {"plan": plan.key, "digests": digests}
    if files is not None:
        record["manifest"] = encode_manifest(replace(plan.draft, files=files)).decode()
    write_file(records / f"{part.name}.json", json.dumps(record).encode(), is_shared=True)


def _take_over(work: PartsPlan, own: Part, records: Path, claims: Claims) -> Iterator[Part]:
    """Write parts that are lost until all are done, and yield them; `own` is the last one to look at."""
    silent = replace(work.options.write, progress=lambda nbytes: None)
    work = replace(work, options=replace(work.options, write=silent))
    parts, is_said = [replace(own, number=(own.number + step) % own.of + 1) for step in range(own.of)], False
    while left := unfinished(records, parts):
        if (taken := next((part for part in left if _write_lost(work, part, own, records, claims)), None)) is not None:
            yield taken
            continue
        if not is_said:
            numbers = ", ".join(str(number) for number in sorted(part.number for part in left))
            logger.warning("%s: waiting for part%s %s of %d", work.options.out, "s"[: len(left) > 1], numbers, own.of)
            is_said = True
        time.sleep(claims.every_s)


def _write_lost(work: PartsPlan, part: Part, own: Part, records: Path, claims: Claims) -> bool:
    """Write a part if no process has it; return whether it was written."""
    out = Path(work.options.out)
    with ExitStack() as stack:
        if not stack.enter_context(claims.taken_over(part)):
            return False
        try:
            folder = stack.enter_context(sharing(out, force=work.options.force, find_owned=files_of_manifest))
        except OutputError:
            if not unfinished(records, [part]):  # its owner has finished it, and a commit all of them
                return False
            raise
        # The owner of a lost part may hang, and have its lock. A commit waits for either.
        is_locked = any(is_locked_for_us(stack, records, out, each) for each in (part, own))
        if not is_locked or not unfinished(records, [part]):
            return False
        check_mark(folder, records)
        logger.warning("%s: taking over part %d of %d, which no process is writing", out, part.number, part.of)
        _write(work, part, folder, records)
        return True


def commit(out: Address, *, force: bool = False) -> Manifest | None:
    """Merge what all parts have written into a checkpoint, byte for byte that of a single pack.

    It can be killed at any point and run again. It reads headers and auxiliary files; `reshard verify` reads all.
    Return None if there is nothing to do: there are no parts, and `out` is a checkpoint.

    # Note [A commit that was killed]
    While the folder is exchanged with the one that it replaces, that one briefly has the name under which the parts
    were written, and must not be mistaken for them. So the folder is identified in commit.json before it is renamed,
    by its inode, which renaming does not change.

    Raises:
        OutputError: parts are missing, running or damaged, or `out` exists or cannot be written.
        InputError: files were changed since their parts wrote them.
    """
    if is_url(out):
        from reshard.operations.bucket_commit import commit_in_bucket

        return commit_in_bucket(out, force=force)
    out = Path(out)
    try:
        return _commit(out, force)
    except OSError as error:  # it can be run again
        where, hint = str(error.filename or out), f"run reshard commit {out} again"
        raise refused_by_system(where, error, "cannot be written", hint, code="output.unwritable") from error


def _commit(out: Path, force: bool) -> Manifest | None:
    beside, partial = records_folder(out), partial_of(out)
    if is_identified(out, out, beside):
        shutil.rmtree(partial, ignore_errors=True)
        remove_records(beside)
        return read_manifest(out)
    if not (beside / PLAN_NAME).is_file():
        if (out / MANIFEST_NAME).is_file():
            return None
        problem = "there are no packed parts to commit"
        raise OutputError(str(out), problem, "run reshard pack --part first", code="output.no-parts")
    plan = read_record(beside / PLAN_NAME)
    records = beside / plan["id"]
    records.mkdir(exist_ok=True)
    parts = [Part(number=number, of=plan["of"], command=tuple(plan["command"])) for number in range(1, plan["of"] + 1)]
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(locked_part(records, out, part))
        if is_identified(partial, out, beside):  # a commit was killed right before it renamed the folder
            write_file(mark_of(partial, records), b"")
            (beside / COMMIT_NAME).unlink()
        check_mark(partial, records)
        manifest, digests = _gather(out, records, parts, plan["plan"])
        headers = {shard.path: _header(partial, shard, digests.get(shard.path, {})) for shard in manifest.shards}
        for auxiliary in manifest.files:
            check_whole(LocalFile(partial / auxiliary.path), auxiliary.digest)
        manifest = _with_digests(manifest, headers)
        check_manifest(manifest)
        names = set(files_in(manifest))
        with publishing(
            out,
            force=force,
            find_owned=files_of_manifest,
            wanted=names,
            is_resumable=lambda _: True,
            outlives_errors=True,
            journal=mark_of(partial, records).name,
        ) as folder:
            keep_only(folder, {*names - {MANIFEST_NAME}, mark_of(folder, records).name})
            for shard in manifest.shards:
                _write_header(folder / shard.path, shard.nbytes, headers[shard.path])
            if has_index(manifest):
                FolderTarget(folder).copy(INDEX_NAME, _index_of(manifest, headers, digests))
            write_manifest(folder, manifest)
            write_file(beside / COMMIT_NAME, json.dumps(identify(folder, out)).encode())
        remove_records(beside)
    return manifest


def _write_header(path: Path, nbytes: int, header: bytes) -> None:
    OutputFile(path, nbytes, "buffered").finish((header,), sync=True)


def _gather(out: Path, records: Path, parts: Sequence[Part], key: str) -> tuple[Manifest, dict[str, dict[str, str]]]:
    """Return the drafted manifest and all tensors' digests, from the records of all parts."""
    done = {part.number: read_record(path) for part in parts if (path := records / f"{part.name}.json").is_file()}
    missing = [part for part in parts if part.number not in done]
    if missing:
        numbers = ", ".join(str(part.number) for part in missing)
        command = shlex.join([*missing[0].command, "--part", f"{missing[0].number}/{missing[0].of}"])
        problem = f"part{'s' if len(missing) > 1 else ''} {numbers} of {len(parts)} not finished"
        raise OutputError(str(out), problem, f"run {command}", code="output.missing-parts")
    digests: dict[str, dict[str, str]] = {}
    for number, record in done.items():
        if record["plan"] != key:
            problem, hint = f"part {number} has another plan", f"remove {records} and pack again"
            raise OutputError(str(out), problem, hint, code="output.other-plan")
        for path, by_name in record["digests"].items():
            digests.setdefault(path, {}).update(by_name)
    return decode_manifest(done[1]["manifest"].encode(), str(records / f"{parts[0].name}.json")), digests


def _header(folder: Path, shard: Shard, digests: Mapping[str, str]) -> bytes:
    """Return a shard's final header: its template, with digests in place of zeros."""
    path = folder / shard.path

    def damaged(problem: str) -> OutputError:
        return OutputError(str(path), problem, "run the parts again, without --take-over", code="output.damaged-parts")

    if not path.is_file() or path.stat().st_size != shard.nbytes:
        raise damaged(f"expected a file of {shard.nbytes} bytes")
    found = read_header(path)
    if digests.keys() != {entry.name for entry in found.tensors}:
        raise damaged("its header and the parts' records name different tensors")
    expected = " ".join(digests[entry.name] for entry in found.tensors)
    # Zeros, our digests, or a mix of both if a commit was killed; anything else is another pack's shard.
    written = found.metadata.get(DIGESTS_KEY, "")
    if len(written) != len(expected) or any(has not in ("0", due) for has, due in zip(written, expected, strict=True)):
        raise damaged("its header has digests that no part of this pack computed")
    return encode_header(found.tensors, {**found.metadata, DIGESTS_KEY: expected})


def _index_of(manifest: Manifest, headers: Mapping[str, bytes], digests: Mapping[str, Iterable[str]]) -> MadeFile:
    indexed = [shard for shard in manifest.shards if is_indexed(shard.holds, shard.path)]
    total_nbytes = sum(shard.nbytes - len(headers[shard.path]) for shard in indexed)
    return index_file({shard.path: digests[shard.path] for shard in indexed}, total_nbytes)


def _with_digests(manifest: Manifest, headers: Mapping[str, bytes]) -> Manifest:
    return replace(
        manifest,
        stages=tuple(
            replace(
                stage,
                shards=tuple(replace(shard, digest=digest_bytes(headers[shard.path])) for shard in stage.shards),
            )
            for stage in manifest.stages
        ),
    )
