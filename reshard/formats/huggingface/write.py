"""export: from bundles back to the Hugging Face folder that they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from manifests.digest import split_digests
from manifests.errors import ManifestError
from manifests.index import INDEX_NAME
from manifests.models.config import CONFIG_NAME, with_dtype
from manifests.safetensors import DIGESTS_KEY
from manifests.versions import without_version
from reshard.formats.auxiliary import with_source_files
from reshard.formats.export import ExportPlan, publish_export
from reshard.formats.table import ExportOptions, ExportResult
from reshard.plans.pack_plan import OutputShard, with_header
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import DerivedFile, MemoryFile
from reshard.tensors.source_index import RecordedShard, index_anew, lay_out_anew, new_header_text
from reshard.transforms.conversion import STORED, ExportDtype, cast_checkpoint, casts_in, with_config
from stores.base import read_whole
from stores.bundles import TensorAt
from stores.open import Address


def plan_export(checkpoint: Checkpoint) -> tuple[OutputShard, ...]:
    """Plan every tensor into the shard that it came from.

    A shard whose tensors still have their original dtypes and shapes gets its original header; otherwise, or if that
    has digests of other bytes, it gets a new one, in the same order. A shard without remaining tensors (`--drop`) is
    not written.
    """
    dropped = set(checkpoint.record.dropped)
    planned = []
    for recorded in checkpoint.record.shards:
        names = recorded.header.names
        if not names or not dropped.issuperset(names):
            planned.append(_shard(recorded, checkpoint))
    return tuple(planned)


def export(checkpoint: Checkpoint, out: Address, options: ExportOptions) -> ExportResult:
    """Write a Hugging Face folder, with shards, index and auxiliary files as in the source."""
    checkpoint = with_config_for(cast_checkpoint(checkpoint, options.dtype), options.dtype)
    shards = plan_export(checkpoint)
    config = checkpoint.config_at
    index = _index_of(checkpoint, shards)
    headers = {shard.path: shard.given.header_text for shard in shards if shard.given is not None}
    identical = headers == {shard.name: shard.header_text for shard in checkpoint.record.shards}
    copied = with_source_files(checkpoint.auxiliary, is_same=identical)
    plan = ExportPlan(
        copied=[item for item in copied if item is not config],
        shards=shards,
        made=[] if index is None else [MemoryFile(INDEX_NAME, index)],
        last=CONFIG_NAME,  # a folder without it is not a model
        last_bytes=lambda: read_whole(config.file, config.digest),
    )
    return publish_export(out, plan, options, casts_in(checkpoint), identical=identical)


def _shard(recorded: RecordedShard, checkpoint: Checkpoint) -> OutputShard:
    dropped, recorded_header = set(checkpoint.record.dropped), recorded.header
    entries = tuple(entry for entry in recorded_header.tensors if entry.name not in dropped)
    origins = tuple(_tensor(checkpoint, checkpoint.shape.fqn_of(entry.name)) for entry in entries)
    same = len(entries) == len(recorded_header.tensors) and all(
        (entry.dtype, entry.shape) == (origin.dtype, origin.shape)
        for entry, origin in zip(entries, origins, strict=True)
    )
    text, metadata = recorded.header_text, _metadata_for(origins, recorded_header.metadata)
    if not same or metadata != recorded_header.metadata:
        kinds = {
            entry.name: (entry.name, origin.dtype, origin.shape) for entry, origin in zip(entries, origins, strict=True)
        }
        entries = lay_out_anew(entries, kinds)
        text = new_header_text(entries, metadata)
    return with_header(recorded.name, origins, text, entries)


def _metadata_for(origins: Sequence[TensorAt], metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return a header's metadata, without digests, as our own files have them, of other bytes than these tensors'."""
    digests = split_digests(metadata.get(DIGESTS_KEY, "")) or ()
    changed = (
        origin.digest != digest if origin.blake3 is not None else isinstance(origin.file, DerivedFile)
        for origin, digest in zip(origins, digests, strict=False)
    )
    if not digests or (len(digests) == len(origins) and not any(changed)):
        return metadata
    return {key: value for key, value in metadata.items() if key != DIGESTS_KEY}


def _tensor(checkpoint: Checkpoint, fqn: str) -> TensorAt:
    if fqn not in checkpoint.tensors:
        raise ManifestError(
            "source.json",
            f"lists {fqn!r}, which is in no bundle",
            "the manifest is incomplete; pack the source again",
            code="manifest.source-mismatch",
        )
    return checkpoint.tensors[fqn]


def _index_of(checkpoint: Checkpoint, shards: tuple[OutputShard, ...]) -> bytes | None:
    """Return the original index, or a new one if sizes or tensors changed; the export is not a version."""
    index = checkpoint.record.index
    if index is None:
        return None
    recorded = (entry.nbytes for shard in checkpoint.record.shards for entry in shard.header.tensors)
    now = (origin.nbytes for shard in shards for origin in shard.origins)
    is_same = all(before == after for before, after in zip_longest(recorded, now))
    new = index if is_same else index_anew(index, {shard.path: shard.entries for shard in shards})
    return without_version(new, INDEX_NAME)


def with_config_for(checkpoint: Checkpoint, dtype: ExportDtype) -> Checkpoint:
    """Update a config, on which readers rely: its dtype to the one that all parameters are cast to, and its ties."""
    if dtype == "source":
        return checkpoint
    config = checkpoint.read_config()
    updated = with_dtype(config, STORED[dtype])
    is_same = updated == config and not checkpoint.untied
    return checkpoint if is_same else with_config(checkpoint, updated, f"for {dtype}")
