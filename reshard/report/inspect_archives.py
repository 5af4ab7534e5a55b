"""The output of `reshard inspect` for checkpoints of other trainers: what their tables say."""

from __future__ import annotations

from typing import Any

from manifests.command.sizes import show_bytes
from manifests.errors import printable
from manifests.safetensors import nbytes_of
from reshard.formats.table import Listing
from reshard.report.text import table


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
        table(("part", "tensors", "bytes"), rows, left=frozenset({"part"})),
    ]
    if listing.others:
        lines.append(f"other values: {', '.join(listing.others)}")
    if with_tensors:
        columns = ("tensor", "dtype", "shape", "chunks")
        cells = [(item.name, item.dtype, str(list(item.shape)), str(item.num_chunks)) for item in listing.tensors]
        lines.append(table(columns, cells, left=frozenset(columns[:3])))
    return printable("\n".join(lines))


def _parts(listing: Listing) -> list[tuple[str, int, int]]:
    """Return each part with its number of tensors and their bytes."""
    parts = {tensor.part: (0, 0) for tensor in listing.tensors}
    for tensor in listing.tensors:
        num, nbytes = parts[tensor.part]
        parts[tensor.part] = (num + 1, nbytes + nbytes_of(tensor.dtype, tensor.shape))
    return [(part, num, nbytes) for part, (num, nbytes) in parts.items()]
