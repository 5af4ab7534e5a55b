"""export: bundles become the Hugging Face folder they came from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import InputError
from manifests.jsontext import parse_json_object
from manifests.publish import publishing
from manifests.safetensors import TensorEntry, encode_header, layout_tensors
from manifests.store import write_file
from reshard.checkpoint import Checkpoint, TensorAt
from reshard.engine import WriteOptions, write_shards
from reshard.formats.huggingface import CONFIG_NAME
from reshard.pack import carry_files
from reshard.plan import OutputShard
from reshard.record import INDEX_NAME, RecordedShard

__all__ = ["ExportReport", "export_huggingface", "plan_export"]

_HF_ALIGNMENT = 8  # what the safetensors library pads its headers to


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """`identical` says that headers, order and index are the source's own, byte for byte."""

    num_files: int
    nbytes: int
    identical: bool


def plan_export(checkpoint: Checkpoint) -> tuple[OutputShard, ...]:
    """Lay every tensor back into the shard it came from.

    A shard whose tensors kept dtype and shape gets its own header again; one whose tensors were
    trained in another dtype gets a new header, in the same order. A shard of which nothing is left
    (`--drop`) is not written.
    """
    dropped = set(checkpoint.record.dropped)
    shards = ((recorded, {entry.name for entry in recorded.header.tensors}) for recorded in checkpoint.record.shards)
    return tuple(_shard(recorded, checkpoint) for recorded, names in shards if not names or names - dropped)


def export_huggingface(
    checkpoint: Checkpoint, out: Path, *, force: bool, options: WriteOptions | None = None
) -> ExportReport:
    """Write a Hugging Face folder: shards, index and small files as they came.

    Raises:
        InputError: a bundle's bytes are not what their digests say, or `out` exists.
    """
    shards = plan_export(checkpoint)
    with publishing(out, force=force, is_ours=_is_model_folder) as folder:
        carried = carry_files(checkpoint.carried, folder)
        written = write_shards(shards, folder, options)
        index = _index_text(checkpoint, shards)
        if index is not None:
            write_file(folder / INDEX_NAME, index.encode())
    return ExportReport(
        num_files=len(written) + len(carried) + (index is not None),
        nbytes=sum(shard.nbytes for shard in written),
        identical=[shard.header for shard in shards] == [_own_header(shard) for shard in checkpoint.record.shards],
    )


def _shard(recorded: RecordedShard, checkpoint: Checkpoint) -> OutputShard:
    dropped = set(checkpoint.record.dropped)
    entries = tuple(entry for entry in recorded.header.tensors if entry.name not in dropped)
    origins = tuple(_tensor(checkpoint, entry.name) for entry in entries)
    same = len(entries) == len(recorded.header.tensors) and all(
        (entry.dtype, entry.shape) == (origin.dtype, origin.shape)
        for entry, origin in zip(entries, origins, strict=True)
    )
    if same:
        header = _own_header(recorded)
    else:
        entries = _laid_out_again(entries, origins)
        header = encode_header(entries, recorded.header.metadata, alignment=_HF_ALIGNMENT)
    return OutputShard(path=recorded.name, header=header, entries=entries, origins=origins, with_digests=False)


def _own_header(recorded: RecordedShard) -> bytes:
    raw = recorded.header.raw
    return len(raw).to_bytes(8, "little") + raw


def _tensor(checkpoint: Checkpoint, fqn: str) -> TensorAt:
    if fqn not in checkpoint.tensors:
        raise InputError("source.json", f"names {fqn!r}, which no bundle holds", "the manifest is incomplete")
    return checkpoint.tensors[fqn]


def _laid_out_again(entries: tuple[TensorEntry, ...], origins: tuple[TensorAt, ...]) -> tuple[TensorEntry, ...]:
    """Give new offsets in the old data order, listed in the old header order."""
    by_name = {origin.name: origin for origin in origins}
    in_data_order = sorted(entries, key=lambda entry: (entry.begin, entry.end))
    placed = {
        entry.name: entry
        for entry in layout_tensors(
            (entry.name, by_name[entry.name].dtype, by_name[entry.name].shape) for entry in in_data_order
        )
    }
    return tuple(placed[entry.name] for entry in entries)


def _index_text(checkpoint: Checkpoint, shards: tuple[OutputShard, ...]) -> str | None:
    """Give the index as it was; where sizes or tensors changed, in transformers' own spelling."""
    text = checkpoint.record.index_text
    if text is None:
        return None
    recorded = [entry.nbytes for shard in checkpoint.record.shards for entry in shard.header.tensors]
    now = [entry.nbytes for shard in shards for entry in shard.entries]
    if recorded == now:
        return text
    index = parse_json_object(text.encode(), INDEX_NAME)
    metadata = index.get("metadata")
    index["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": sum(now)}
    index["weight_map"] = {entry.name: shard.path for shard in shards for entry in shard.entries}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _is_model_folder(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file() and any(folder.glob("*.safetensors"))
