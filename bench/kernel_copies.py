"""Compare the copy engine with kernel copies of the same byte ranges, when bundles with digests are resharded.

    python bench/kernel_copies.py [--gb 1] [--runs 5] [--folder DIR] [--out bench/results/kernel-copies.json]

The engine reads, checks every tensor's digest and writes; `copy_file_range` moves the same runs of bytes without
reading them. Both flush what they wrote. docs/adr/0012 is based on this.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

from reshard.copy.engine import write_shards
from reshard.estimate.assumptions import Assumptions
from reshard.formats.open import open_source
from reshard.packing.plan import LayoutRequest, lay_out
from reshard.plans.pack_plan import OutputShard

WIDTH = 2048
RUN_NBYTES = 64 << 20


def main() -> None:
    options = measure.options_of(__doc__, gb=1.0).parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-kernel-") as scratch:
        root = Path(scratch)
        write_checkpoint(root / "source", llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        measure.run_quietly(
            [*measure.RESHARD, "pack", str(root / "source"), "--layout", "pp=4", "--out", str(root / "packed")]
        )
        checkpoint = open_source(str(root / "packed"))
        plan = lay_out("bench", checkpoint, LayoutRequest(spec="pp=2"), Assumptions()).plan
        shards = [shard for stage in plan.stages for shard in stage.shards]
        ways: dict[str, Callable[[Path], object]] = {
            "engine": lambda out: write_shards(shards, out),
            **{f"kernel_{count}": lambda out, count=count: kernel_copy(shards, out, count) for count in (1, 2, 4)},
        }
        load = [measure.load_average()]
        turns = measure.take_turns({name: partial(_time, way, root / name) for name, way in ways.items()}, options.runs)
    result = {
        "what": "bundles of 4 stages resharded to 2: by the engine, and by copy_file_range in 1, 2 and 4 threads; "
        "flushed, warm cache; medians, ratios within a turn",
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "nbytes": sum(shard.nbytes for shard in shards),
        "turns": options.runs,
        "wall_s": {name: round(statistics.median(turn[name][0] for turn in turns), 2) for name in ways},
        "processor_s": {name: round(statistics.median(turn[name][1] for turn in turns), 2) for name in ways},
        "ratio_to_engine": {
            name: measure.median_ratio((turn[name][0] for turn in turns), (turn["engine"][0] for turn in turns))
            for name in ways
        },
    }
    measure.write_result(result, options.out)


def kernel_copy(shards: list[OutputShard], out: Path, num_threads: int) -> None:
    """Copy a plan's bytes with copy_file_range, adjacent tensors in one call."""
    outputs = [_create(out / shard.path, shard) for shard in shards]
    jobs = [(output, run) for output, shard in zip(outputs, shards, strict=True) for run in _runs(shard)]
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(_copy, *zip(*jobs, strict=True)))
    for output in outputs:
        os.fsync(output)
        os.close(output)


def _create(path: Path, shard: OutputShard) -> int:
    path.parent.mkdir(parents=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.truncate(descriptor, shard.nbytes)
    os.pwrite(descriptor, shard.header, 0)
    return descriptor


def _runs(shard: OutputShard) -> list[tuple[str, int, int, int]]:
    """Yield runs as (file, offset in it, offset in the output, bytes)."""
    runs: list[tuple[str, int, int, int]] = []
    for entry, origin in zip(shard.entries, shard.origins, strict=True):
        position = len(shard.header) + entry.begin
        if runs:
            file, source, target, nbytes = runs[-1]
            if (file, source + nbytes) == (str(origin.file), origin.begin) and nbytes < RUN_NBYTES:
                runs[-1] = (file, source, target, nbytes + origin.nbytes)
                continue
        runs.append((str(origin.file), origin.begin, position, origin.nbytes))
    return runs


def _copy(output: int, run: tuple[str, int, int, int]) -> None:
    file, source, target, nbytes = run
    descriptor = os.open(file, os.O_RDONLY)
    while nbytes:
        copied = os.copy_file_range(descriptor, output, nbytes, source, target)
        source, target, nbytes = source + copied, target + copied, nbytes - copied
    os.close(descriptor)


def _time(way: Callable[[Path], object], out: Path) -> tuple[float, float]:
    """Return the wall time and the CPU time of one copy."""
    out.mkdir()
    os.sync()
    began_s, used_s = time.perf_counter(), time.process_time()
    way(out)
    took = time.perf_counter() - began_s, time.process_time() - used_s
    shutil.rmtree(out)
    return took


if __name__ == "__main__":
    main()
