"""The differences of two states of tensors, spooled to disk, and the shards of a delta that they make."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.index import MAX_SHARD_NBYTES, split_by_size
from manifests.paths import root_shard_path
from manifests.safetensors import layout_tensors
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import ByteCounter
from reshard.formats.delta.codec import Encoder
from reshard.plans.pack_plan import GivenHeader, OutputShard
from reshard.tensors.checkpoint import check_digest
from reshard.tensors.lazy import read_blocks
from reshard.tensors.source_index import new_header_text
from stores.bundles import TensorAt
from stores.local import LocalFile
from stores.workers import Take, share_out

_LEAST_NBYTES = MAX_SHARD_NBYTES // 100_000  # that a tensor counts as: the header of a shard has a limit, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Both states of a tensor, with digests, and the compressed difference, unless they are equal."""

    old: TensorAt
    new: TensorAt
    stored: TensorAt | None
    num_changed: int


def compare_states(
    pairs: Sequence[tuple[TensorAt, TensorAt]],
    spool: Path,
    parallelism: Parallelism,
    progress: ByteCounter,
) -> dict[str, Difference]:
    """Read both states of tensors, in several threads, and spool the differences; return them in that order."""
    differences: dict[str, Difference] = {}

    def compare(take: Take[tuple[TensorAt, TensorAt]], stop: threading.Event) -> None:
        path = spool / f"{threading.get_ident()}.zst"
        with open(path, "ab") as file:
            while not stop.is_set() and (pair := take()) is not None:
                old, new = pair
                begin, encoder = file.tell(), Encoder(new.nbytes, file.write)
                blocks = (read_blocks(replace(tensor, blake3=None)) for tensor in pair)  # the encoder hashes them
                for before, after in zip(*blocks, strict=True):
                    if stop.is_set():
                        return
                    encoder.add(before, after)
                    progress(len(before) + len(after))
                digests = encoder.finish()
                for tensor, digest in zip(pair, digests, strict=True):
                    check_digest(tensor, digest.hex())
                nbytes = file.tell() - begin
                differences[new.name] = Difference(
                    old=replace(old, blake3=digests[0]),
                    new=replace(new, blake3=digests[1]),
                    stored=TensorAt(new.name, "U8", (nbytes,), LocalFile(path, may_change=True), begin, nbytes)
                    if nbytes
                    else None,
                    num_changed=encoder.num_changed,
                )

    share_out(pairs, compare, parallelism.threads_for(len(pairs)))
    return {new.name: differences[new.name] for _, new in pairs}


def delta_shards(differences: Sequence[Difference]) -> list[OutputShard]:
    digests = {difference.new.name: difference.new.digest or "" for difference in differences}
    stored = [difference.stored for difference in differences if difference.stored is not None]
    runs = split_by_size(stored, lambda tensor: max(tensor.nbytes, _LEAST_NBYTES), MAX_SHARD_NBYTES)
    shards = []
    for at, run in enumerate(runs):
        entries = layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in run)
        text = new_header_text(entries, {tensor.name: digests[tensor.name] for tensor in run})
        given = GivenHeader.of(text, entries)
        path = root_shard_path(at, len(runs))
        shards.append(OutputShard(path=path, origins=tuple(run), header_nbytes=len(given.header), given=given))
    return shards
