"""The shard of a delta as a run writes it: compressed differences, and the digests of the new states in the header."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import torch

from manifests.safetensors import encode_header, layout_tensors
from manifests.versions import LEVEL
from runner.checkpoint.shard_file import PART_NBYTES, check_not_cancelled, syncing
from runner.load.fill import bytes_of


def write_delta(
    path: Path,
    states: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    digests: Mapping[str, str],
    is_cancelled: Callable[[], bool],
) -> Generator[None, None, int]:
    """Write zstd of `old ^ new` of each tensor, given both by FQN on the CPU, fsync the file and return its bytes."""
    from zstandard import ZstdCompressor  # of an extra

    # The header comes first: room is left for that of the largest frames that there can be.
    most = layout_tensors((fqn, "U8", (_most_nbytes(new.nbytes),)) for fqn, (_, new) in states.items())
    sums = {fqn: digests[fqn] for fqn in states}
    room, sizes = len(encode_header(most, sums)), dict[str, int]()
    compressor = ZstdCompressor(level=LEVEL, write_checksum=True)
    with syncing(path) as stream:
        stream.seek(room)
        for fqn, (old, new) in states.items():
            frame, begin = compressor.compressobj(size=new.nbytes), stream.tell()
            before, after = (torch.frombuffer(bytes_of(tensor), dtype=torch.uint8) for tensor in (old, new))
            for first in range(0, new.nbytes, PART_NBYTES):
                check_not_cancelled(path, is_cancelled)
                difference = before[first : first + PART_NBYTES] ^ after[first : first + PART_NBYTES]
                stream.write(frame.compress(difference.numpy().data))
                yield
            stream.write(frame.flush())
            sizes[fqn] = stream.tell() - begin
        stream.seek(0)
        entries = layout_tensors((fqn, "U8", (size,)) for fqn, size in sizes.items())
        stream.write(encode_header(entries, sums, alignment=room))
    return room + sum(sizes.values())


def _most_nbytes(nbytes: int) -> int:
    return nbytes + nbytes // 100 + 1024  # of a frame: above ZSTD_compressBound
