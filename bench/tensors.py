"""Time the cost per tensor when packing 1,000, 10,000 and 100,000 small ones, and write it as JSON.

    python bench/tensors.py [--runs 5] [--folder DIR] [--out bench/results/tensors.json]

Each tensor is 2 KiB, so that almost all of the time is overhead, not disk. The time covers opening, planning and
packing within one process, without its start; an export is compared with the source first.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import experts_config, write_checkpoint

NUM_LAYERS = 8
COUNTS = (1_000, 10_000, 100_000)
TENSORS_PER_SHARD = 1_000
FLAT = 1.5  # largest allowed ratio of the costs per tensor


def main() -> None:
    parser = measure.options_of(__doc__)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(pack_here(options.child[0], Path(options.child[1]))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-tensors-") as scratch:
        sources = {}
        for count in COUNTS:
            config = experts_config(NUM_LAYERS, count // (3 * NUM_LAYERS))
            sources[count] = Path(scratch, str(count))
            write_checkpoint(sources[count], config, num_shards=max(1, count // TENSORS_PER_SHARD))
            check(sources[count])
        measures = {str(count): partial(pack_once, source) for count, source in sources.items()}
        turns = measure.take_turns(measures, options.runs)
    cost_us, cpu_us = (
        {name: statistics.median(turn[name][field] / turn[name]["num"] for turn in turns) * 1e6 for name in measures}
        for field in ("wall_s", "cpu_s")
    )
    result = {
        "what": "open, plan and pack (--no-sync) tensors of 2 KiB onto 4 stages, within one process; warm cache",
        **measure.circumstances(),
        "turns": options.runs,
        "num_tensors": {name: int(turns[0][name]["num"]) for name in measures},
        "us_per_tensor": {name: round(cost, 1) for name, cost in cost_us.items()},
        "processor_us_per_tensor": {name: round(cost, 1) for name, cost in cpu_us.items()},
        "most_over_least": round(max(cost_us.values()) / min(cost_us.values()), 2),
        "is_flat": max(cost_us.values()) / min(cost_us.values()) <= FLAT,
        "peak_mb": round(max(turn[str(COUNTS[-1])]["peak_nbytes"] for turn in turns) / 1e6),
    }
    measure.write_result(result, options.out)


def check(source: Path) -> None:
    """Check the result first: an export of the pack equals the source, byte for byte."""
    packed, back = source.with_name("packed"), source.with_name("back")
    measure.run_quietly([*measure.RESHARD, "pack", str(source), "--layout", "pp=4", "--out", str(packed), "--no-sync"])
    measure.run_quietly([*measure.RESHARD, "export", str(packed), "--to", "hf", "--out", str(back), "--no-sync"])
    names = sorted(path.name for path in source.iterdir())
    assert names == sorted(path.name for path in back.iterdir())
    assert filecmp.cmpfiles(source, back, names, shallow=False) == (names, [], [])
    shutil.rmtree(packed)
    shutil.rmtree(back)


def pack_once(source: Path) -> dict[str, float]:
    """Pack in a new process, and return what it measured."""
    out = source.with_name("packed")
    child = [sys.executable, __file__, "--child", str(source), str(out)]
    found: dict[str, float] = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    shutil.rmtree(out)
    os.sync()
    return found


def pack_here(source: str, out: Path) -> dict[str, float]:
    import resource

    from reshard.copy.engine import WriteOptions
    from reshard.estimate.assumptions import Assumptions
    from reshard.operations.pack import PackOptions, pack
    from reshard.operations.resolve import LayoutRequest, lay_out
    from reshard.sources.open import open_source

    began_s, cpu_s = time.perf_counter(), time.process_time()
    checkpoint = open_source(source)
    planned = lay_out("bench", checkpoint, LayoutRequest(spec="pp=4"), Assumptions())
    pack(checkpoint, planned.plan, PackOptions(out=out, write=WriteOptions(sync=False)))
    return {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - cpu_s,
        "num": len(checkpoint.tensors),
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
