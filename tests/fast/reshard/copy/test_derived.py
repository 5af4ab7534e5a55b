"""What derived tensors are made of is fetched within the streams of the command, as tensors that are copied are."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from manifests.slices import Slice
from reshard.copy.engine import WriteOptions, write_shards
from reshard.copy.parallelism import Parallelism
from reshard.plans.pack_plan import without_header
from reshard.tensors.lazy import STEP_NBYTES
from reshard.tensors.slices import merge_slices
from reshard.transforms.casts import cast_tensor, have_equal_samples
from stores.base import Range
from stores.bundles import TensorAt
from stores.net.retries import Streams
from stores.prefetch import Fetch, RangeReader

NUM_TENSORS, SIDE = 8, 256
VALUES = np.random.default_rng(0).normal(size=(NUM_TENSORS, SIDE, SIDE)).astype("<f4")


class Server:
    """A slow server that counts the requests that it answers at a time, and the bytes of all."""

    def __init__(self) -> None:
        self.streams, self.num_running, self.most_running, self.nbytes = Streams(), 0, 0, 0
        self.lock = threading.Lock()

    def add(self, change: int, nbytes: int = 0) -> None:
        with self.lock:
            self.nbytes += nbytes
            self.num_running += change
            self.most_running = max(self.most_running, self.num_running)


@dataclass(frozen=True, slots=True)
class Remote:
    data: bytes
    server: Server = field(compare=False)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def fingerprint(self) -> str:
        return str(len(self.data))

    @property
    def streams(self) -> Streams:
        return self.server.streams

    def open(self, ranges: Sequence[Range]) -> RangeReader:
        return RangeReader(self._fetch, ranges)

    def fetching(self) -> Fetch:
        return self._fetch

    def _fetch(self, into: memoryview, position: int, stop: threading.Event) -> None:
        with self.streams.slot(stop):
            self.server.add(1, len(into))
            time.sleep(0.01)
            into[:] = self.data[position : position + len(into)]
            self.server.add(-1)


def stored(number: int, server: Server, part: Slice | None = None) -> TensorAt:
    """Return a tensor in a file, or its slice of some columns."""
    first, width = (part.offset[1], part.shape[1]) if part else (0, SIDE)
    file = Remote(VALUES[number][:, first : first + width].tobytes(), server)
    return TensorAt(f"t{number}", "F32", (SIDE, width), file, 0, file.nbytes, None, part)


def of_columns(number: int, server: Server, num_slices: int = 4) -> TensorAt:
    width = SIDE // num_slices
    parts = (Slice(offset=(0, width * at), shape=(SIDE, width), whole_shape=(SIDE, SIDE)) for at in range(num_slices))
    return merge_slices([stored(number, server, part) for part in parts])


@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("is_sliced", [False, True])
def test_origins_are_read_within_the_streams_of_the_command(is_sliced: bool, num_streams: int, tmp_path: Path) -> None:
    server = Server()
    make = of_columns if is_sliced else stored
    tensors = [cast_tensor(make(number, server), "F16") for number in range(NUM_TENSORS)]
    parallelism = Parallelism(num_threads=4, num_streams=num_streams, memory_nbytes=4 << 20)
    shards = [without_header(tensor.name, [tensor]) for tensor in tensors]
    write_shards(shards, tmp_path, WriteOptions(io="buffered", sync=False, parallelism=parallelism))
    assert [(tmp_path / f"t{number}").read_bytes() for number in range(NUM_TENSORS)] == [
        values.astype("<f2").tobytes() for values in VALUES
    ]
    assert (server.most_running, parallelism.used.num_streams) == (num_streams, num_streams)


NBYTES = 40 << 20


@pytest.mark.parametrize(
    ("position", "num_samples", "is_equal"),
    [(None, 3, True), (0, 1, False), (NBYTES // 2, 2, False), (NBYTES - 1, 3, False), (NBYTES // 4, 3, True)],
)
def test_of_two_remote_tensors_three_samples_are_read_until_two_differ(
    position: int | None, num_samples: int, is_equal: bool
) -> None:
    server, data = Server(), bytearray(NBYTES)
    if position is not None:
        data[position] = 1
    files = Remote(bytes(NBYTES), server), Remote(b"\0" + data, server)
    first, second = [TensorAt("head", "F32", (NBYTES // 4,), file, begin, NBYTES) for begin, file in enumerate(files)]
    counted: list[int] = []
    assert have_equal_samples(first, second, "F32", counted.append) == is_equal
    assert server.nbytes == sum(counted) == 2 * num_samples * STEP_NBYTES


def test_samples_in_two_dtypes_are_of_the_same_values() -> None:
    server, count = Server(), 3 * STEP_NBYTES
    values = np.arange(count, dtype=np.float32)
    files = Remote(values.tobytes(), server), Remote(values.astype(np.float64).tobytes(), server)
    first, second = (
        TensorAt("head", dtype, (count,), file, 0, file.nbytes)
        for dtype, file in zip(("F32", "F64"), files, strict=True)
    )
    assert have_equal_samples(first, second, "F32")
    assert not have_equal_samples(first, replace(second, shape=(1, count)), "F32")
    assert server.nbytes == 3 * (STEP_NBYTES + STEP_NBYTES // 2)
