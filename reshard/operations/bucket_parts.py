"""A pack in parts to a bucket: each part writes whole shards to a folder of its own, and a commit lists them all.

# Note [Parts in a bucket]
An object is written by one process, and cannot be renamed. So each attempt at a part is an output by itself, below the
prefix in `parts-KEY/part-I-of-N.K/`, where KEY is of the plan and K counts the attempts. It is locked and resumed like
any other output (see `stores.object_output`), and its last object is a record of its shards. Its shards stay there: the
manifest names them. Part 1 writes the auxiliary files, too, which the commit copies to the prefix.

No process ever writes to or removes an attempt that another may be at: who takes a part over begins the next one. All
that are complete have the same bytes. The first commit chooses one of each part, in an object that is created only
where none is, as the manifest is. What is not chosen is removed once there is a manifest; before, readers see no model.

An attempt is lost once its claim was not renewed for a while: see `reshard.operations.object_claims`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manifests.codec import encode_manifest
from manifests.digest import PREFIX
from manifests.errors import InputError, OutputError, UnreachableError, UserError
from manifests.index import INDEX_NAME
from manifests.invariants import SOURCE_NAME
from reshard.copy.bucket import BucketTarget
from reshard.copy.resumable import open_target
from reshard.copy.unchanged import check_unchanged
from reshard.operations.object_claims import ObjectClaims
from reshard.operations.pack import PackOptions, check_stored_ties, copy_auxiliary_files
from reshard.operations.part_objects import (
    OF_PART,
    PackedShard,
    check_creates,
    complete_attempts,
    folders_in,
    folders_of,
    manifest_in,
    other_plan,
)
from reshard.operations.parts_plan import PartsPlan
from reshard.plans.partition import Part, shards_of_part
from stores.base import PART_NAME
from stores.object_client import ObjectEntry
from stores.objects import list_objects
from stores.writable import open_writable

__all__ = ["pack_part_to_bucket"]

logger = logging.getLogger(__name__)

_LOST_S = 60.0  # without --take-over


def pack_part_to_bucket(plan: PartsPlan, part: Part, take_over_s: float | None) -> tuple[Part, ...]:
    """Write one part of the bundles; return the other parts that were written. See `pack_distributed.pack_part`."""
    parts = _Parts(plan, part, take_over_s)
    parts.check()
    parts.write_own()
    return () if take_over_s is None else tuple(parts.take_over())


class _Parts:
    """The parts of a plan in a bucket, of which this process was asked for one."""

    def __init__(self, plan: PartsPlan, own: Part, take_over_s: float | None) -> None:
        self._plan, self._own, self._waits = plan, own, take_over_s is not None
        self._client = open_writable(str(plan.options.out))
        self._folder = f"parts-{plan.key.removeprefix(PREFIX)[:12]}"
        self._lost_after_s = take_over_s or _LOST_S

    def check(self) -> None:
        """Refuse a prefix where something else is, unless this part is done, and perhaps just being committed.

        Raises:
            OutputError: there is an output, or others' objects or parts.
        """
        quick, self._client = self._client, self._client.settled()
        listed = list_objects(self._client if self._waits else quick)
        self._claims = ObjectClaims(self._client, quick, self._folder, self._lost_after_s)
        if not self._unfinished([self._own], listed):
            return
        folders = folders_in(listed)
        ours = {item.path for item in self._plan.checkpoint.auxiliary} | {SOURCE_NAME, INDEX_NAME}
        committing = ours if self._folder in folders else set()  # a commit that was killed has written some of these
        if any(OF_PART.fullmatch(name) is None and name not in committing for name in listed):
            raise OutputError(self._client.url, "already exists", "choose another --out", code="output.exists")
        if others := folders - {self._folder}:
            raise other_plan(self._client, others)
        check_creates(self._client, self._folder)

    def write_own(self) -> None:
        """Write the part that was asked for, unless it is done, or another process is at it that may be waited for.

        Raises:
            OutputError: another process is writing it.
        """
        own, listed = self._own, list_objects(self._client)
        if not self._unfinished([own], listed):
            return
        try:  # an attempt whose writer is known to have ended is resumed
            self._write(own, self._claims.first(own, listed), self._plan.options)
            return
        except UserError as error:
            if not self._can_wait(error):
                raise
        while not self._waits:
            listed = list_objects(self._client)
            if not self._unfinished([own], listed) or self._write_lost(own, listed):
                return
            if self._claims.is_renewed(own):
                problem, hint = f"another process is writing part {own.number}/{own.of}", "wait for it, or stop it"
                raise OutputError(self._client.url, problem, hint, code="output.in-use")
            time.sleep(self._claims.every_s)

    def take_over(self) -> Iterator[Part]:
        """Write parts that are lost until all are done, and yield them; the own one is the last to look at."""
        own = self._own
        parts = [replace(own, number=(own.number + step) % own.of + 1) for step in range(own.of)]
        while left := self._unfinished(parts, listed := list_objects(self._client)):
            taken = next((part for part in left if self._write_lost(part, listed)), None)
            if taken is None:
                time.sleep(self._claims.every_s)
            elif taken != own:
                yield taken

    def _write_lost(self, part: Part, listed: Mapping[str, ObjectEntry]) -> bool:
        """Write a part if the last attempt at it is lost; return whether it was written."""
        attempt = self._claims.next(part, listed)
        if attempt is None or not self._unfinished([part], list_objects(self._client)):
            return False
        logger.warning(
            "%s: taking over part %d of %d, which no process is writing", self._client.url, part.number, part.of
        )
        options = self._plan.options
        if part != self._own:
            options = replace(options, write=replace(options.write, progress=lambda nbytes: None))
        try:
            self._write(part, attempt, options)
        except UserError as error:
            if not self._can_wait(error):
                raise
            return False
        return True

    def _can_wait(self, error: UserError) -> bool:
        """Whether an error says that another process is at a part, or that to try again later may help."""
        if self._waits and isinstance(error, UnreachableError):
            logger.warning("%s", error)
            return True
        return error.code in ("output.unfinished", "output.contended")

    def _write(self, part: Part, attempt: int, options: PackOptions) -> None:
        """Write an attempt at a part, unless another one is complete first."""
        try:
            self._write_all(part, attempt, options)
        except InputError as error:
            if self._unfinished([part], list_objects(self._client)):
                raise
            logger.info("part %d was written by another process: %s", part.number, error)

    def _write_all(self, part: Part, attempt: int, options: PackOptions) -> None:
        plan, shards = self._plan, shards_of_part(self._plan.shards, part)
        auxiliary = plan.checkpoint.auxiliary if part.number == 1 else ()
        wanted = {PART_NAME, *(shard.path for shard in shards), *(item.path for item in auxiliary)}
        wanted |= {SOURCE_NAME} if part.number == 1 else set()
        place = f"{self._client.url}/{self._folder}/{part.name}.{attempt}"
        with (
            open_target(place, shards, force=False, wanted=wanted, last=PART_NAME) as target,
            self._claims.renewed(part, attempt),
        ):
            assert isinstance(target, BucketTarget)
            record: dict[str, Any] = {"plan": plan.key, "command": list(part.command)}
            if part.number == 1:
                check_stored_ties(plan.checkpoint)
                files = copy_auxiliary_files(plan.checkpoint, target)
                record["manifest"] = encode_manifest(replace(plan.draft, files=files)).decode()
            done = target.write_shards(shards, options.write)
            check_unchanged(plan.shards, plan.checkpoint.auxiliary)
            written = target.objects.written()
            record["objects"] = {name: (entry.nbytes, entry.etag) for name, entry in written.items()}
            record["shards"] = {
                shard.path: PackedShard(
                    digest=each.digest,
                    names=[origin.name for origin in shard.origins] if shard.is_indexed else None,
                    data_nbytes=sum(origin.nbytes for origin in shard.origins),
                )
                for shard, each in zip(shards, done, strict=True)
            }
            target.commit(PART_NAME, json.dumps(record).encode())

    def _unfinished(self, parts: Sequence[Part], listed: Mapping[str, ObjectEntry]) -> list[Part]:
        """Return the parts that are not done; none if they are committed."""
        done = complete_attempts(listed, self._folder)
        left = [part for part in parts if part.number not in done]
        return [] if left and self._folder in folders_of(manifest_in(self._client, listed)) else left
