"""Copy with 1 to 64 threads where reading, hashing and writing only wait, and write each number's efficiency as JSON.

    python bench/threads.py [--out bench/results/threads.json] [--runs 3]

A machine with few cores cannot show how a pack scales, but it can show what one thread keeps from the others: the work
that holds Python's lock, and locks of our own. Everything else of a block of 1 MiB is simulated by sleeping: hashing at
4 GB/s, as a core does, reading and writing at 0.4 GB/s each, a 64th of an array of disks at 25 GB/s. With n
threads, efficiency is n times fewer seconds, relative to one thread; 1.0 means that threads keep nothing from others.
The serial share is the part of one thread's work that, done by one thread at a time, would give the same efficiency.
The same with a file of one tensor, which is hashed in order, and so at most as fast as one core hashes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

from reshard.copy import engine, runs
from reshard.copy.engine import WriteOptions, write_shards
from reshard.copy.parallelism import Parallelism
from reshard.plans.pack_plan import OutputShard
from stores.base import Range
from stores.bundles import TensorAt
from stores.local import LocalFile

HASH_NBYTES_PER_S, DISK_NBYTES_PER_S = 4e9, 0.4e9
TENSOR_NBYTES, TENSORS_PER_FILE = 16 << 20, 64
NUM_THREADS = (1, 2, 4, 8, 16, 32, 64)
NUM_THREADS_ON_ONE = (1, 2, 4, 8, 16)
FILES_PER_THREAD = 0.5  # 512 MiB


class Waiting:
    """Reader, hasher and output file that take time, and nothing else."""

    is_aligned = True

    def __init__(self, *_: object, **__: object) -> None:
        self.path = Path()

    def read_into(self, part: memoryview, position: int) -> None:
        time.sleep(len(part) / DISK_NBYTES_PER_S)

    def update(self, part: memoryview) -> None:
        time.sleep(len(part) / HASH_NBYTES_PER_S)

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        time.sleep((end - begin) / DISK_NBYTES_PER_S)

    def digest(self) -> bytes:
        return bytes(32)

    def hexdigest(self) -> str:
        return bytes(32).hex()

    def finish(self, header: object, *, sync: bool) -> None: ...

    def close(self) -> None: ...


class SimulatedFile(LocalFile):
    """A source file."""

    nbytes = TENSOR_NBYTES * TENSORS_PER_FILE
    fingerprint = ""

    def open(self, ranges: Sequence[Range]) -> Waiting:  # type: ignore[override]
        return Waiting()


def main() -> None:
    options = measure.options_of(__doc__, runs=3).parse_args()
    average = [measure.load_average()]
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-threads-") as scratch,
        mock.patch.object(engine, "OutputFile", Waiting),
        mock.patch.object(runs, "Hasher", Waiting),
    ):
        folder = Path(scratch)
        many = {str(number): partial(copy_s_per_mib, number, folder, TENSOR_NBYTES) for number in NUM_THREADS}
        one = {f"one {number}": partial(copy_s_per_mib, number, folder) for number in NUM_THREADS_ON_ONE}
        turns = measure.take_turns(many | one, options.runs)
    average.append(measure.load_average())
    result = {
        "what": "efficiency of threads that copy, where reading, hashing and writing only wait: the seconds of a MiB "
        "with one thread, to n times those with n threads",
        **measure.circumstances(),
        "load_average": average,
        "hash_gb_per_s": HASH_NBYTES_PER_S / 1e9,
        "disk_gb_per_s": DISK_NBYTES_PER_S / 1e9,
        "threads": {str(number): summary(number, turns) for number in NUM_THREADS},
        "threads_on_one_tensor": {str(number): summary(number, turns, "one ") for number in NUM_THREADS_ON_ONE},
    }
    measure.write_result(result, options.out)


def summary(number: int, turns: Sequence[Mapping[str, float]], kind: str = "") -> dict[str, float]:
    """Return the speed and efficiency of so many threads, and the serial share of the work that explains it."""
    efficiency = measure.median_ratio(
        (turn[f"{kind}1"] for turn in turns), (number * turn[f"{kind}{number}"] for turn in turns)
    )
    return {
        "gb_per_s": round(2**20 / 1e9 / statistics.median(turn[f"{kind}{number}"] for turn in turns), 2),
        "efficiency": efficiency,
        **({"serial_share": round((1 / efficiency - 1) / (number - 1), 5)} if number > 1 else {}),
    }


def copy_s_per_mib(num_threads: int, folder: Path, tensor_nbytes: int | None = None) -> float:
    """Copy files of tensors of this size, or one file of one tensor; return the seconds of a MiB."""
    count = max(1, round(num_threads * FILES_PER_THREAD))
    nbytes = count * SimulatedFile.nbytes
    tensors = (
        [tensors_of(tensor_nbytes) for _ in range(count)] if tensor_nbytes else [tensors_of(nbytes, num_tensors=1)]
    )
    shards = [
        OutputShard(path=f"{number}.safetensors", origins=origins, header_nbytes=4096)
        for number, origins in enumerate(tensors)
    ]
    began_s = time.perf_counter()
    write_shards(shards, folder, WriteOptions(parallelism=Parallelism(num_threads=num_threads)))
    return (time.perf_counter() - began_s) / (nbytes >> 20)


def tensors_of(tensor_nbytes: int, num_tensors: int = TENSORS_PER_FILE) -> tuple[TensorAt, ...]:
    file = SimulatedFile(Path())
    return tuple(
        TensorAt(
            name=f"t{number}",
            dtype="U8",
            shape=(tensor_nbytes,),
            file=file,
            begin=number * tensor_nbytes,
            nbytes=tensor_nbytes,
        )
        for number in range(num_tensors)
    )


if __name__ == "__main__":
    main()
