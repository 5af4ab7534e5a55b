"""The output of `reshard inspect`: of a manifest, and of other trainers' checkpoints what their tables say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, starmap
from typing import Any

from manifests.codec import manifest_document
from manifests.command.sizes import show_bytes
from manifests.errors import printable
from manifests.safetensors import nbytes_of
from manifests.schema import Manifest
from reshard.formats.table import Listing
from reshard.formatting import show_numbers
from reshard.layouts.inventory import compress_modules
from reshard.report.text import table, table_lines, tie_lines
from stores.bundles import Bundles, TensorAt

_LINES_IN_PIECE = 4096


def inspect_text(manifest: Manifest, bundles: Bundles, with_tensors: bool) -> Iterator[str]:
    """Yield the output in pieces: with tensors it may have a million lines."""
    layout = manifest.layout
    rows = [
        (
            str(stage.index),
            str(stage.rank),
            str(stage.virtual),
            compress_modules(stage.modules) or "(empty)",
            str(stage.num_tensors),
            f"{stage.num_params:,}",
            show_bytes(stage.nbytes),
        )
        for stage in manifest.stages
    ]
    head = ("stage", "rank", "virtual", "modules", "tensors", "params", "bytes")
    training = manifest.training
    lines = [
        f"{manifest.model.architecture}, {manifest.model.num_layers} layers, {manifest.model.num_params:,} parameters",
        f"from {manifest.source.kind}: {manifest.source.location}",
        f"written by {manifest.created_by}"
        + (f" after step {training.step}, {training.num_tokens:,} tokens" if training else "")
        + (f", with the optimizer state of {training.optimizer.name}" if training and training.optimizer else ""),
        f"layout {layout.spec}: {layout.num_stages} stages on {layout.num_ranks} ranks, style {layout.style}",
        table(head, rows, left_columns=frozenset({"modules"})),
        *tie_lines(manifest.ties),
        *_virtual_lines(manifest),
        "files: " + ", ".join(file.path for file in manifest.files),
    ]
    tensors = _tensors(manifest, bundles) if with_tensors else []
    yield printable("\n".join(lines)) + "\n"
    if with_tensors:
        columns = ("stage", "tensor", "dtype", "shape", "blake3")
        listed = table_lines(columns, lambda: starmap(_row, tensors), left_columns=frozenset(columns[1:]))
        while some := list(islice(listed, _LINES_IN_PIECE)):
            yield printable("\n".join(some)) + "\n"


def inspect_json(manifest: Manifest, bundles: Bundles, with_tensors: bool) -> Iterator[str]:
    """Yield one JSON object, in pieces."""
    begun = json.dumps({"version": 1, "manifest": manifest_document(manifest)})
    if not with_tensors:
        yield begun + "\n"
        return
    listed = map(json.dumps, starmap(_object, _tensors(manifest, bundles)))
    yield begun.removesuffix("}") + ', "tensors": ['
    separator = ""
    while some := ", ".join(islice(listed, _LINES_IN_PIECE)):
        yield separator + some
        separator = ", "
    yield "]}\n"


def _tensors(manifest: Manifest, bundles: Bundles) -> list[tuple[int, TensorAt]]:
    bundles.read_ahead(manifest.stages)
    return [(stage.index, tensor) for stage in manifest.stages for tensor in bundles.tensors_on(stage)]


def _row(stage: int, tensor: TensorAt) -> tuple[str, ...]:
    return str(stage), tensor.name, tensor.dtype, _shape(tensor), tensor.digest or ""


def _object(stage: int, tensor: TensorAt) -> dict[str, Any]:
    return {
        "stage": stage,
        "fqn": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "offset": list(tensor.offset),
        "whole_shape": list(tensor.whole_shape),
        "nbytes": tensor.nbytes,
        "blake3": tensor.digest,
    }


def _shape(tensor: TensorAt) -> str:
    if tensor.shape == tensor.whole_shape:
        return str(list(tensor.shape))
    return f"{list(tensor.shape)} at {list(tensor.offset)} of {list(tensor.whole_shape)}"


def _virtual_lines(manifest: Manifest) -> list[str]:
    virtual = manifest.virtual
    if virtual is None:
        return []
    place = virtual.location + (f"@{virtual.revision}" if virtual.revision else "")
    stages = show_numbers(stage.index for stage in manifest.stages if stage.spans)
    return [f"virtual: stages {stages} reference {len(virtual.files)} files in {place}"]


def listing_json(listing: Listing, with_tensors: bool) -> dict[str, Any]:
    parts = {part: {"num_tensors": num, "nbytes": nbytes} for part, num, nbytes in _parts(listing)}
    listed = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "nbytes": nbytes_of(tensor.dtype, tensor.shape),
            "num_chunks": tensor.num_chunks,
        }
        for tensor in listing.tensors
    ]
    head = {"version": 1, "format": listing.format, "num_files": listing.num_files, "parts": parts}
    return {**head, "other_parts": list(listing.others), **({"tensors": listed} if with_tensors else {})}


def listing_text(listing: Listing, with_tensors: bool) -> str:
    rows = [(part, str(num), show_bytes(nbytes)) for part, num, nbytes in _parts(listing)]
    lines = [
        f"{listing.title}, {listing.num_files} files",
        table(("part", "tensors", "bytes"), rows, left_columns=frozenset({"part"})),
    ]
    if listing.others:
        lines.append(f"other values: {', '.join(listing.others)}")
    if with_tensors:
        columns = ("tensor", "dtype", "shape", "chunks")
        cells = [(item.name, item.dtype, str(list(item.shape)), str(item.num_chunks)) for item in listing.tensors]
        lines.append(table(columns, cells, left_columns=frozenset(columns[:3])))
    return printable("\n".join(lines))


def _parts(listing: Listing) -> list[tuple[str, int, int]]:
    """Return each part with its number of tensors and their bytes."""
    parts = {tensor.part: (0, 0) for tensor in listing.tensors}
    for tensor in listing.tensors:
        num, nbytes = parts[tensor.part]
        parts[tensor.part] = (num + 1, nbytes + nbytes_of(tensor.dtype, tensor.shape))
    return [(part, num, nbytes) for part, (num, nbytes) in parts.items()]
