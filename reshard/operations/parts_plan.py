"""What the processes that each pack a part have in common: the plan, and the key that identifies it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from manifests.codec import encode_manifest
from manifests.digest import PREFIX, digest_bytes
from manifests.schema import Manifest
from reshard.copy.engine import WrittenShard
from reshard.copy.journal import plan_key
from reshard.operations.pack import PackOptions, Written, build_manifest
from reshard.plans.pack_plan import OutputShard, PackPlan
from reshard.plans.partition import Part
from reshard.plans.references import refer_to_originals
from reshard.tensors.checkpoint import Checkpoint

__all__ = ["PartsPlan", "parts_plan"]

_BLANK = f"{PREFIX}{'0' * 64}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsPlan:
    """The shards that the parts write, the manifest without digests and auxiliary files, and the key of both."""

    checkpoint: Checkpoint
    shards: Sequence[OutputShard]
    draft: Manifest
    key: str
    options: PackOptions


def parts_plan(checkpoint: Checkpoint, plan: PackPlan, part: Part, options: PackOptions) -> PartsPlan:
    """Return the plan of a pack in as many parts as `part` is one of.

    Raises:
        InputError: a bundle that would be virtual has no original file to refer to.
    """
    wanted = range(len(plan.stages)) if options.stages is None else options.stages
    shards = [shard for stage in plan.stages if stage.index in wanted for shard in stage.shards]
    draft = _draft(checkpoint, plan, shards, wanted)
    auxiliary = json.dumps([(item.path, item.file.fingerprint, item.digest) for item in checkpoint.auxiliary]).encode()
    key = digest_bytes(f"{plan_key(shards)} {part.of} ".encode() + encode_manifest(draft) + auxiliary)
    return PartsPlan(checkpoint=checkpoint, shards=shards, draft=draft, key=key, options=options)


def _draft(checkpoint: Checkpoint, plan: PackPlan, shards: Sequence[OutputShard], wanted: Collection[int]) -> Manifest:
    """Return the manifest as far as it is known before a byte is read: without digests and auxiliary files."""
    references = refer_to_originals([stage for stage in plan.stages if stage.index not in wanted], checkpoint)
    unread = {shard.path: WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=_BLANK) for shard in shards}
    return build_manifest(checkpoint, plan, Written(unread, references, ()))
