"""`.metadata` of a torch.distributed.checkpoint folder against its files, read without torch.

Source: torch 2.13.0, torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from manifests.slices import Slice, problem_with_slices
from reshard.archives.dcp import bad_metadata, load_metadata
from reshard.archives.names import METADATA_NAME
from reshard.archives.pickled import Record
from reshard.formats.dcp.read import read_stored
from reshard.formats.table import CheckOptions
from reshard.formatting import count_of, some
from reshard.tensors.finding import Contents, Findings
from stores.base import Folder

_MOST_DIMENSIONS = 64  # of a tensor of torch
_Item: TypeAlias = tuple[str, tuple[int, ...] | None]  # a chunk's FQN and where it begins in the tensor
_AGAIN = "the checkpoint is incomplete or damaged; copy or save it again"


def check(folder: Folder, findings: Findings, options: CheckOptions) -> Contents:
    """Report items whose files are missing or too short, and tensors whose chunks are not the whole of them.

    Raises:
        SourceError: the metadata cannot be read.
    """
    file = folder.file(METADATA_NAME)
    metadata = load_metadata(file)
    try:
        tensors = metadata["state_dict_metadata"]
        items = {_item(index): _place(info) for index, info in metadata["storage_data"].items()}
        chunks = {_text(fqn): _chunks(one) for fqn, one in tensors.items()}
    except Exception as error:  # whatever a pickle has in place of what is expected
        raise bad_metadata(file, error) from error
    _report_files(folder, items, findings)
    _report_chunks(str(file), chunks, items, findings)
    return Contents(
        num_tensors=sum(slices is not None for slices in chunks.values()),
        num_files=len({path for path, _, _ in items.values()}),
        nbytes=sum(nbytes for _, _, nbytes in set(items.values())),
        tensors=read_stored(folder) if options.reads_tensors and not findings else {},
    )


def _item(index: Record) -> _Item:
    """Return which chunk of which entry an item is: its name, and where the chunk begins in the tensor."""
    offset = index.fields.get("offset")  # only tensors have one
    return _text(index["fqn"]), None if offset is None else _ints(offset)


def _place(info: Record) -> tuple[str, int, int]:
    """Return an item's file, where it begins there, and its bytes."""
    begin, nbytes = _ints((info["offset"], info["length"]))
    return _text(info["relative_path"]), begin, nbytes


def _chunks(entry: Record) -> tuple[Slice, ...] | None:
    """Return the chunks of a tensor; None for an entry that is something else."""
    if "chunks" not in entry.fields:
        return None
    whole = _ints(entry["size"])
    return tuple(
        Slice(offset=_ints(chunk["offsets"]), shape=_ints(chunk["sizes"]), whole_shape=whole)
        for chunk in entry["chunks"]
    )


def _ints(found: Any) -> tuple[int, ...]:
    if not isinstance(found, tuple | list) or len(found) > _MOST_DIMENSIONS:
        raise ValueError("a size or place that is none")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in found):
        raise ValueError("a size or place that is none")
    return tuple(found)


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise ValueError("a name that is none")
    return found


def _report_files(folder: Folder, items: Mapping[_Item, tuple[str, int, int]], findings: Findings) -> None:
    """Report files that are missing, end before an item does, or have two items in one place."""
    names, places = set(folder.names()), dict[str, list[tuple[int, int, str]]]()
    for (fqn, _), (path, begin, nbytes) in items.items():
        places.setdefault(path, []).append((begin, begin + nbytes, fqn))
    for path, found in sorted(places.items()):
        where, needed = f"{folder}/{path}", max(end for _, end, _ in found)
        if path not in names:
            lost = [fqn for _, _, fqn in found]
            problem = f"no such file; without it {count_of(lost, 'item')} missing: {some(lost)}"
            findings.add(where, problem, _AGAIN, lost, code="check.missing-shard")
        elif (nbytes := folder.file(path).nbytes) < needed:
            lost = [fqn for _, end, fqn in found if end > nbytes]
            problem = f"expected at least {needed} bytes ({METADATA_NAME}), found {nbytes}"
            findings.add(where, problem, _AGAIN, lost, code="check.truncated-file")
        ranges = sorted({(begin, end) for begin, end, _ in found})  # entries with the same value may share its bytes
        if any(one[1] > other[0] for one, other in pairwise(ranges)):
            problem = "two items overlap in this file"
            findings.add(where, problem, _AGAIN, code="check.overlapping-items")


def _report_chunks(
    where: str, chunks: Mapping[str, tuple[Slice, ...] | None], items: Mapping[_Item, object], findings: Findings
) -> None:
    """Report tensors whose chunks do not cover them, and chunks and entries that are stored nowhere."""
    entries = {fqn for fqn, _ in items}
    for fqn, slices in chunks.items():
        place = f"{where}: {fqn!r}"
        if slices is None:
            if fqn not in entries:
                findings.add(place, "is stored in no file", _AGAIN, code="check.absent-item")
            continue
        absent = [part for part in slices if (fqn, part.offset) not in items]
        if absent:
            problem = f"{len(absent)} of its {len(slices)} chunks are stored in no file"
            findings.add(place, problem, _AGAIN, code="check.absent-item")
        if problem_found := _problem_with_chunks(slices):
            findings.add(place, problem_found, _AGAIN, code="check.uncovered-tensor")


def _problem_with_chunks(chunks: Sequence[Slice]) -> str | None:
    """Return why these chunks, which may be of any shape, are not the whole tensor; None if they are."""
    if not chunks:
        return "has no chunks"
    for part in chunks:
        if len(part.offset) != len(part.whole_shape) or len(part.shape) != len(part.whole_shape):
            found = f"{list(part.offset)} and {list(part.shape)}"
            return f"expected a chunk's offsets and sizes in {len(part.whole_shape)} dimensions, found {found}"
        if any(end > most for end, most in zip(part.end, part.whole_shape, strict=True)):
            return f"expected chunks within {list(part.whole_shape)}, found {list(part.offset)} to {list(part.end)}"
    return problem_with_slices(chunks)
