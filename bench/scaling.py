"""Time packs of more and more tensors, stages and bytes, and write what each of them costs as JSON.

    python bench/scaling.py [--runs 3] [--folder DIR] [--out bench/results/scaling.json]

Tensors are of 2 KiB, so that almost all of the time is overhead, not disk: opening, planning and packing within one
process, without its start and without a flush; an export is compared with the source first. Bytes are packed by the
command, with digests and a flush, beside `cp -r` and a flush in the same turn.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import experts_config, llama_of, write_checkpoint

COUNTS = (1_000, 10_000, 100_000)  # of tensors, in 8 layers and on 4 stages
STAGES = (4, 32, 256)  # of a model with 256 layers and some 10,000 tensors
GIGABYTES = (0.25, 1.0, 4.0)
TENSORS_PER_SHARD = 1_000
WIDTH = 1024


def main() -> None:
    parser = measure.options_of(__doc__, runs=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        source, out, num_stages = options.child
        print(json.dumps(pack_here(source, Path(out), int(num_stages))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-scaling-") as scratch:
        root = Path(scratch)
        average = [measure.load_average()]
        small = {
            "tensors": in_turn({f"{count:,}": packs_of(root, 8, count, 4) for count in COUNTS}, options.runs),
            "stages": in_turn({str(count): packs_of(root, 256, 10_000, count) for count in STAGES}, options.runs),
        }
        nbytes, contenders = write_bytes(root)
        turns = measure.take_turns(contenders, options.runs)
    result = {
        "what": "open, plan and pack (--no-sync) tensors of 2 KiB within one process, by their number and by that of "
        "stages; and pack by bytes, with digests and a flush, beside cp -r and a flush; warm cache",
        **measure.circumstances(),
        "load_average": [*average, measure.load_average()],
        "turns": options.runs,
        **small,
        "bytes": {
            f"{size / 1e9:.2f} GB": {
                "pack_to_cp_and_sync": measure.median_ratio(
                    *([turn[f"{name} {gb}"].wall_s for turn in turns] for name in ("pack", "cp"))
                ),
                "peak_anonymous_mb": round(max(turn[f"pack {gb}"].anonymous_nbytes for turn in turns) / 1e6, 1),
            }
            for gb, size in nbytes.items()
        },
    }
    measure.write_result(result, options.out)


def in_turn(measures: Mapping[str, Callable[[], Mapping[str, float]]], num_turns: int) -> dict[str, dict[str, float]]:
    """Return what each measure found, by its name: medians, and the largest memory."""
    turns = measure.take_turns(measures, num_turns)
    return {name: summary([turn[name] for turn in turns]) for name in measures}


def summary(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        "num_tensors": found[0]["num"],
        "wall_s": round(statistics.median(each["wall_s"] for each in found), 3),
        "us_per_tensor": round(statistics.median(each["wall_s"] / each["num"] for each in found) * 1e6, 1),
        "processor_us_per_tensor": round(statistics.median(each["cpu_s"] / each["num"] for each in found) * 1e6, 1),
        "peak_mb": round(max(each["peak_nbytes"] for each in found) / 1e6),
    }


def packs_of(root: Path, num_layers: int, num_tensors: int, num_stages: int) -> Callable[[], dict[str, float]]:
    """Write a checkpoint, unless it is there, and return what packs it."""
    source = root / f"{num_layers}-{num_tensors}"
    if not source.exists():
        config = experts_config(num_layers, num_tensors // (3 * num_layers))
        write_checkpoint(source, config, num_shards=max(1, num_tensors // TENSORS_PER_SHARD))
    check(source, num_stages)
    return partial(pack_once, source, num_stages)


def write_bytes(root: Path) -> tuple[dict[float, int], dict[str, Callable[[], measure.Run]]]:
    """Write checkpoints of each size; return their bytes, and the commands that pack and copy them."""
    nbytes: dict[float, int] = {}
    commands: dict[str, Callable[[], measure.Run]] = {}
    packed, copied = root / "packed", root / "copied"
    for gb in GIGABYTES:
        source = root / f"{gb}-gb"
        nbytes[gb] = write_checkpoint(source, llama_of(gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        pack = [*measure.RESHARD, "pack", str(source), "--layout", "pp=4", "--out", str(packed), "--quiet"]
        copy = ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', str(source), str(copied)]
        commands[f"pack {gb}"] = partial(measure.run_measured, pack, packed)
        commands[f"cp {gb}"] = partial(measure.run_measured, copy, copied)
    os.sync()
    return nbytes, commands


def check(source: Path, num_stages: int) -> None:
    """Check the result first: an export of the pack equals the source, byte for byte."""
    packed, back = source.with_name("packed"), source.with_name("back")
    pack = [*measure.RESHARD, "pack", str(source), "--layout", f"pp={num_stages}", "--out", str(packed), "--no-sync"]
    measure.run_quietly(pack)
    measure.run_quietly([*measure.RESHARD, "export", str(packed), "--to", "hf", "--out", str(back), "--no-sync"])
    names = sorted(path.name for path in source.iterdir())
    assert names == sorted(path.name for path in back.iterdir())
    assert filecmp.cmpfiles(source, back, names, shallow=False) == (names, [], [])
    shutil.rmtree(packed)
    shutil.rmtree(back)


def pack_once(source: Path, num_stages: int) -> dict[str, float]:
    """Pack in a new process, and return what it measured."""
    out = source.with_name("packed")
    child = [sys.executable, __file__, "--child", str(source), str(out), str(num_stages)]
    found: dict[str, float] = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    shutil.rmtree(out)
    os.sync()
    return found


def pack_here(source: str, out: Path, num_stages: int) -> dict[str, float]:
    from reshard.copy.engine import WriteOptions
    from reshard.estimate.assumptions import Assumptions
    from reshard.formats.open import open_source
    from reshard.packing.bundles import write_bundles
    from reshard.packing.options import PackOptions
    from reshard.packing.plan import LayoutRequest, lay_out

    began_s, cpu_s = time.perf_counter(), time.process_time()
    checkpoint = open_source(source)
    planned = lay_out("bench", checkpoint, LayoutRequest(spec=f"pp={num_stages}"), Assumptions())
    write_bundles(checkpoint, planned.plan, PackOptions(out=out, write=WriteOptions(sync=False)))
    return {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - cpu_s,
        "num": len(checkpoint.tensors),
        "peak_nbytes": peak_nbytes(),
    }


def peak_nbytes() -> int:
    """Return the peak memory of this process; getrusage has that of the parent, if it is larger."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
