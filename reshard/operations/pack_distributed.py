"""A pack in parts: processes on any machines each write a share below one folder; a commit makes it a checkpoint.

What a part did lies beside that folder, in `.NAME.parts`: a record once it is done, until then a journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from manifests.codec import decode_manifest, encode_manifest
from manifests.digest import PREFIX, digest_bytes
from manifests.errors import (
    OutputError,
    UsageError,
    refused_by_system,
)
from manifests.fixed import is_fixed, move_back
from manifests.invariants import MANIFEST_NAME, check_manifest
from manifests.jsontext import parse_json_object
from manifests.owned import files_of_manifest
from manifests.publish import partial_of, publishing, sharing
from manifests.safetensors import DIGESTS_KEY, encode_header, read_header
from manifests.schema import Manifest, Shard
from manifests.store import read_manifest, read_small_file, write_file, write_manifest
from reshard.copy.destination import FolderTarget
from reshard.copy.direct_io import OutputFile
from reshard.copy.engine import WrittenShard, write_tensors
from reshard.copy.journal import Journal, plan_key
from reshard.copy.resumable import keep_only
from reshard.copy.unchanged import check_unchanged
from reshard.operations.pack import (
    PLAN_NAME,
    Outcome,
    PackOptions,
    carry_all,
    check_stored_ties,
    describe,
    parts_of,
)
from reshard.plans.pack_plan import OutputShard, PackPlan
from reshard.plans.partition import Part, Share, deal
from reshard.plans.references import refer_to_originals
from reshard.tensors.checkpoint import Checkpoint
from stores.address import is_url
from stores.base import check_whole
from stores.local import LocalFile

__all__ = ["commit", "pack_part"]

_MARK_NAME = "commit.json"  # of the folder that is about to get its name
_BLANK = f"{PREFIX}{'0' * 64}"


def pack_part(checkpoint: Checkpoint, plan: PackPlan, part: Part, options: PackOptions) -> None:
    """Write a part's share of the bundles, and a record of it.

    A part that was killed goes on where it was. Part 1 also writes the small files.

    Raises:
        InputError: as `pack`; another process writes this part, or other parts are of another plan.
    """
    if is_url(options.out):
        raise UsageError(
            "--part",
            "parts meet in a folder, which a bucket does not have",
            "pack into a folder",
            code="options.parts-in-bucket",
        )
    out = Path(options.out)
    wanted = range(len(plan.stages)) if options.stages is None else options.stages
    shards = [shard for stage in plan.stages if stage.index in wanted for shard in stage.shards]
    draft = _draft(checkpoint, plan, shards, wanted)
    small = json.dumps([(item.path, item.file.fingerprint, item.digest) for item in checkpoint.carried]).encode()
    key = digest_bytes(f"{plan_key(shards)} {part.of} ".encode() + encode_manifest(draft) + small)
    shares = deal(shards, part.of)[part.number - 1]
    with sharing(out, force=options.force, find_owned=files_of_manifest) as folder:
        records = _begin(out, folder, key, part)
        with _held(records / f"{part.name}.lock", str(out), f"part {part.number}/{part.of}"):
            journal = Journal(folder, key, records / f"{part.name}.journal")
            if not journal.is_begun:
                _check_space(shares, folder)
            journal.begin()
            files = None
            if part.number == 1:
                check_stored_ties(checkpoint)
                files = carry_all(checkpoint, FolderTarget(folder))
            write = replace(options.write, journal=journal)
            digests = {}
            for share in shares:
                digests[share.shard.path] = write_tensors(share.shard, share.names, folder, write)
                if share.has_start:
                    _write_header(folder / share.shard.path, share.shard.nbytes, share.shard.header)
            check_unchanged(shards, checkpoint.carried)
            record: dict[str, Any] = {"plan": key, "digests": digests}
            if files is not None:
                record["manifest"] = encode_manifest(replace(draft, files=files)).decode()
            write_file(records / f"{part.name}.json", json.dumps(record).encode())


def commit(out: Path, *, force: bool = False) -> Manifest | None:
    """Make a checkpoint of what all parts have written, with the bytes that one pack would have written.

    Killed at any point, it can be run again. It reads headers and small files; `reshard verify` reads all. None where
    nothing is left to do: no parts wait, and `out` is a checkpoint.

    # Note [A commit that was killed]
    Once the folder has its name, the one that it replaced has the name of the parts' work until it is removed: it must
    not be taken for that. So what is about to be named is written down first, by its inode, which no rename changes.

    Raises:
        InputError: parts are missing or at work, files are not as their parts left them, or `out` exists.
    """
    try:
        return _commit(out, force)
    except OSError as error:  # what was done stays: it can be run again
        where, hint = str(error.filename or out), f"run reshard commit {out} again"
        raise refused_by_system(where, error, "cannot be written", hint, code="output.unwritable") from error


def _commit(out: Path, force: bool) -> Manifest | None:
    records, partial = parts_of(out), partial_of(out)
    if _has_ended(out, records):
        shutil.rmtree(partial, ignore_errors=True)
        _forget(records)
        return read_manifest(out)
    if not (records / PLAN_NAME).is_file():
        if (out / MANIFEST_NAME).is_file():
            return None
        problem = "no parts of a pack are waiting for it"
        raise OutputError(str(out), problem, "see reshard pack --part", code="output.no-parts")
    told = _read(records / PLAN_NAME)
    parts = [Part(number=number, of=told["of"], command=tuple(told["command"])) for number in _up_to(told["of"])]
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(_held(records / f"{part.name}.lock", str(out), f"part {part.number}/{part.of}"))
        if is_fixed(out):
            move_back(out)
        if not partial.exists():
            raise OutputError(
                str(partial),
                "what the parts wrote is gone",
                f"remove {records} and run the parts again",
                code="output.damaged-parts",
            )
        manifest, digests = _gather(out, records, parts, told["plan"])
        headers = {shard.path: _header(partial, shard, digests.get(shard.path, {})) for shard in manifest.shards}
        for carried in manifest.files:
            check_whole(LocalFile(partial / carried.path), carried.digest)
        manifest = _with_digests(manifest, headers)
        check_manifest(manifest)
        names = {MANIFEST_NAME, *headers, *(carried.path for carried in manifest.files)}
        with publishing(
            out,
            force=force,
            find_owned=files_of_manifest,
            wanted=names,
            is_resumable=lambda _: True,
            outlives_errors=True,
        ) as folder:
            keep_only(folder, names - {MANIFEST_NAME})
            for shard in manifest.shards:
                _write_header(folder / shard.path, shard.nbytes, headers[shard.path])
            write_manifest(folder, manifest)
            write_file(records / _MARK_NAME, json.dumps(_identify(folder, out)).encode())
        _forget(records)
    return manifest


def _has_ended(out: Path, records: Path) -> bool:
    """Whether a commit was killed when `out` had its name: see Note [A commit that was killed]."""
    mark = records / _MARK_NAME
    return mark.is_file() and _identify(out, out) == _read(mark)


def _identify(folder: Path, out: Path) -> dict[str, Any]:
    """Name a folder with a manifest, whatever its path is; one whose files move to a fixed `out` by its manifest."""
    if not (folder / MANIFEST_NAME).is_file():
        return {}
    return {
        "inode": 0 if is_fixed(out) else folder.stat().st_ino,
        "manifest": digest_bytes(read_small_file(folder / MANIFEST_NAME)),
    }


def _forget(records: Path) -> None:
    """Remove the records, the mark last: until then, a commit that is run again ends well."""
    for path in records.iterdir():
        if path.name != _MARK_NAME:
            path.unlink(missing_ok=True)
    shutil.rmtree(records, ignore_errors=True)


def _draft(
    checkpoint: Checkpoint, plan: PackPlan, shards: Sequence[OutputShard], wanted: Sequence[int] | frozenset[int]
) -> Manifest:
    """Give the manifest as far as it is known before a byte is read: without digests and small files."""
    references = refer_to_originals([stage for stage in plan.stages if stage.index not in wanted], checkpoint)
    unread = {shard.path: WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=_BLANK) for shard in shards}
    return describe(checkpoint, plan, Outcome(unread, references, ()))


def _begin(out: Path, folder: Path, key: str, part: Part) -> Path:
    """Give the folder of the records; the first part says there what plan all others must have."""
    records = parts_of(out)
    if _has_ended(out, records):
        raise OutputError(
            str(out),
            "a commit was killed when this had its name already",
            f"reshard commit {out} clears up after it",
            code="output.unfinished-commit",
        )
    if not records.exists() and any(folder.iterdir()):
        hint = f"end that one, or remove {folder}"
        raise OutputError(
            str(out), "a pack that is no part of another has left its work here", hint, code="output.not-parts"
        )
    records.mkdir(exist_ok=True)
    plan = json.dumps({"plan": key, "of": part.of, "command": list(part.command)}).encode()
    draft = records / f".{uuid.uuid4().hex}"
    write_file(draft, plan)
    with contextlib.suppress(FileExistsError):
        os.link(draft, records / PLAN_NAME)
    draft.unlink()
    if _read(records / PLAN_NAME)["plan"] != key:
        raise OutputError(
            str(out),
            "other parts here are of another plan: another source, layout, number of parts or version, or a source "
            "that was changed since they began",
            f"run all parts alike, or remove {folder} and {records}",
            code="output.other-plan",
        )
    return records


@contextmanager
def _held(lock: Path, out: str, what: str) -> Iterator[None]:
    """Keep a part for this process. The lock is a file's: file systems of many machines lock no folders."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                out, f"another process has {what}", "wait for that one, or stop it", code="output.in-use"
            ) from error
        except OSError as error:
            raise OutputError(
                str(lock), f"cannot be locked: {error.strerror}", "mount it with flock", code="output.no-locks"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _check_space(shares: Sequence[Share], folder: Path) -> None:
    needed, free = sum(share.nbytes for share in shares), shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            str(folder.parent),
            f"{needed} bytes needed, {free} free",
            "choose another disk for --out",
            code="output.disk-full",
        )


def _write_header(path: Path, nbytes: int, header: bytes) -> None:
    OutputFile(path, nbytes, "buffered").finish(header, sync=True)


def _gather(out: Path, records: Path, parts: Sequence[Part], key: str) -> tuple[Manifest, dict[str, dict[str, str]]]:
    """Give the drafted manifest and all tensors' digests, from the records of all parts."""
    done = {part.number: _read(path) for part in parts if (path := records / f"{part.name}.json").is_file()}
    missing = [part for part in parts if part.number not in done]
    if missing:
        numbers = ", ".join(str(part.number) for part in missing)
        again = shlex.join([*missing[0].command, "--part", f"{missing[0].number}/{missing[0].of}"])
        which = f"part {numbers}" if len(missing) == 1 else f"parts {numbers}"
        raise OutputError(
            str(out),
            f"{which} of {len(parts)} {'is' if len(missing) == 1 else 'are'} not done",
            f"run {again}",
            code="output.missing-parts",
        )
    digests: dict[str, dict[str, str]] = {}
    for number, record in done.items():
        if record["plan"] != key:
            raise OutputError(
                str(out),
                f"part {number} is of another plan",
                f"remove {records} and pack again",
                code="output.other-plan",
            )
        for path, held in record["digests"].items():
            digests.setdefault(path, {}).update(held)
    return decode_manifest(done[1]["manifest"].encode(), str(records / f"{parts[0].name}.json")), digests


def _header(folder: Path, shard: Shard, digests: Mapping[str, str]) -> bytes:
    """Give a shard's final header: the template that stands there, with digests in place of zeros."""
    path = folder / shard.path
    if not path.is_file() or path.stat().st_size != shard.nbytes:
        raise OutputError(
            str(path), f"expected a file of {shard.nbytes} bytes", "run the parts again", code="output.damaged-parts"
        )
    found = read_header(path)
    if digests.keys() != {entry.name for entry in found.tensors}:
        raise OutputError(
            str(path),
            "the parts' records and its header name different tensors",
            "run the parts again",
            code="output.damaged-parts",
        )
    words = " ".join(digests[entry.name] for entry in found.tensors)
    # Zeros, our digests, or what a kill left of these over those; anything else is another pack's shard.
    stands = found.metadata.get(DIGESTS_KEY, "")
    if len(stands) != len(words) or any(has not in ("0", due) for has, due in zip(stands, words, strict=True)):
        raise OutputError(
            str(path),
            "holds digests that no part of this pack found",
            "run the parts again",
            code="output.damaged-parts",
        )
    return encode_header(found.tensors, {**found.metadata, DIGESTS_KEY: words})


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


def _read(path: Path) -> dict[str, Any]:
    return parse_json_object(read_small_file(path), str(path))


def _up_to(last: int) -> range:
    return range(1, last + 1)
