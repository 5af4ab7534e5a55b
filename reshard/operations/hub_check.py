"""Verification of whole files against the SHA-256 that the hub lists, read from the output or again from the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import SourceError
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import Checkpoint
from stores.base import HUB_MISMATCH, InputFile, Listed
from stores.cores import threads_for_ranks
from stores.local import LocalFile

__all__ = ["HubReport", "check_hub_files"]

_BLOCK_NBYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class HubReport:
    """The names of the weight files that match the hub's SHA-256, and of those that were not verified."""

    verified: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a hub file, from `begin` there, and where to read them."""

    begin: int
    nbytes: int
    file: InputFile
    position: int


def check_hub_files(
    checkpoint: Checkpoint, shards: Sequence[OutputShard], folder: Path | None, *, fetch: bool
) -> HubReport:
    """Compare every weight file of a hub repository with the SHA-256 that the hub lists.

    What was written unchanged below `folder` is read from there, which verifies the bytes on disk, also those of an
    interrupted run. The rest of a file is read from the hub if `fetch` allows it; otherwise it is not verified.

    Raises:
        SourceError: a file does not match its SHA-256.
    """
    files = {} if checkpoint.originals is None else checkpoint.originals.files
    listed = {name: file for name, file in files.items() if isinstance(file, Listed) and len(file.listed) == 64}
    written = _written(shards, folder) if folder is not None and listed else {}
    heads = dict.fromkeys(listed, b"")  # of other files than safetensors, pieces have all bytes
    for shard in checkpoint.record.shards:
        if shard.name in listed:
            heads[shard.name] = len(shard.kept.text).to_bytes(8, "little") + shard.kept.text
    plans = {name: list(_pieces(file, len(heads[name]), written.get(file, {}))) for name, file in listed.items()}
    ready = [name for name, pieces in plans.items() if fetch or all(piece.file != listed[name] for piece in pieces)]

    def verify(name: str) -> None:
        import hashlib  # OpenSSL's

        hasher = hashlib.sha256(heads[name])
        for block in _blocks(plans[name]):
            hasher.update(block)
        if hasher.hexdigest() != listed[name].listed:
            raise SourceError(
                str(listed[name]),
                f"expected SHA-256 {listed[name].listed} (the hub's listing), found {hasher.hexdigest()}",
                "a server or proxy sent wrong bytes; run again, or from another network",
                code=HUB_MISMATCH,
            )

    with ThreadPoolExecutor(threads_for_ranks(), thread_name_prefix="hub-check") as pool:
        for done in [pool.submit(verify, name) for name in ready]:
            done.result()
    return HubReport(verified=tuple(ready), unverified=tuple(name for name in listed if name not in ready))


def _written(shards: Sequence[OutputShard], folder: Path) -> dict[InputFile, dict[int, _Piece]]:
    """Return where the bytes of each source file were written, by their offset in it."""
    found: dict[InputFile, dict[int, _Piece]] = {}
    for shard in shards:
        file = LocalFile(folder / shard.path)
        for origin, position in shard.placed:
            piece = _Piece(origin.begin, origin.nbytes, file, position)
            if origin.nbytes:
                found.setdefault(origin.file, {})[origin.begin] = piece
    return found


def _pieces(file: InputFile, head_nbytes: int, written: Mapping[int, _Piece]) -> Iterator[_Piece]:
    """Yield the pieces that make up a file's data, in order; what was not written is read from the file itself."""
    position = head_nbytes
    for begin, piece in sorted(written.items()):
        if begin > position:
            yield _Piece(position, begin - position, file, position)
        if begin >= position:
            yield piece
            position = begin + piece.nbytes
    if position < file.nbytes:
        yield _Piece(position, file.nbytes - position, file, position)


def _blocks(pieces: Sequence[_Piece]) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_BLOCK_NBYTES))
    for piece in pieces:
        end = piece.position + piece.nbytes
        with closing(piece.file.open(((piece.position, end),))) as reader:
            for begin in range(piece.position, end, _BLOCK_NBYTES):
                block = buffer[: min(_BLOCK_NBYTES, end - begin)]
                reader.read_into(block, begin)
                yield block
