"""Compare how the runner loads one stage of four with plain reads of its bytes and with other loaders.

    python bench/load.py [--gb 4] [--runs 5] [--folder DIR] [--out bench/results/load.json]

Each loader runs in a process of its own, which times itself after its imports; all but `cat` end with all
bytes touched in their own memory. Measured once with a warm page cache, and once with a cold one, as on a node that
the job is new to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

WIDTH = 2048
STAGE = 1


def cat(source: Path, packed: Path) -> int:
    """The bytes once, in order, into one small buffer, as `cat` to nowhere does."""
    shard, nbytes = next((packed / f"stage-{STAGE:03d}").glob("*.safetensors")), 0
    buffer = memoryview(bytearray(128 << 10))
    with open(shard, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            nbytes += count
    return nbytes


def read_once(source: Path, packed: Path) -> int:
    """The lower limit: the stage's shard read into one new block of memory, by the same two threads."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    shard = next((packed / f"stage-{STAGE:03d}").glob("*.safetensors"))
    nbytes = shard.stat().st_size
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view, descriptor = memoryview(memory), os.open(shard, os.O_RDONLY)

    def read(begin: int, end: int) -> None:
        while begin < end:
            begin += os.preadv(descriptor, [view[begin : min(end, begin + (1 << 20))]], begin)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read, *half) for half in ((0, nbytes // 2), (nbytes // 2, nbytes))]:
            done.result()
    return nbytes


def runner(source: Path, packed: Path) -> int:
    """What a rank does: build its stage on the meta device, allocate memory, load its bundle, verify digests."""
    import torch

    from runner.bundle.packed import open_packed
    from runner.load.load import load_tensors
    from runner.models import family_for
    from runner.pipeline.chunk import build_chunks, hf_pieces, materialize
    from stores.bundles import Bundles

    found = open_packed(packed)
    family, modules = family_for(found.config, max_seq_len=512), found.stage_modules

    def load() -> int:
        (chunk,) = build_chunks(family, modules, (STAGE,))
        materialize(chunk, device=torch.device("cpu"), dtype=torch.bfloat16)
        bundles = Bundles(found.manifest, found.root)
        return load_tensors(hf_pieces(chunk), bundles, found.shape).nbytes

    build_chunks(family, modules, (STAGE,))  # torchtitan is imported at the first build
    return _timed(load)


def load_file(source: Path, packed: Path) -> int:
    """The safetensors library, with tensors copied out of the mapped file."""
    from safetensors.torch import load_file as load

    shard = next((packed / f"stage-{STAGE:03d}").glob("*.safetensors"))
    return _timed(lambda: _nbytes([tensor.clone() for tensor in load(shard).values()]))


def whole(source: Path, packed: Path) -> int:
    """What each rank does with other tools: load the whole checkpoint into memory."""
    from safetensors.torch import load_file as load

    shards = sorted(source.glob("*.safetensors"))
    return _timed(lambda: _nbytes([tensor.clone() for shard in shards for tensor in load(shard).values()]))


def _nbytes(tensors: list[Any]) -> int:
    """Sum all tensors, so that all are in memory at once."""
    return sum(tensor.nbytes for tensor in tensors)


LOADERS: dict[str, Callable[[Path, Path], int]] = {
    "cat": cat,
    "read_once": read_once,
    "runner": runner,
    "load_file": load_file,
    "whole": whole,
}
_began_s = 0.0


def _timed(load: Callable[[], int]) -> int:
    global _began_s
    _began_s = time.perf_counter()
    return load()


def _child(name: str, source: Path, packed: Path) -> None:
    global _began_s
    _began_s = time.perf_counter()
    nbytes = LOADERS[name](source, packed)
    seconds = time.perf_counter() - _began_s
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"load_s": seconds, "nbytes": nbytes, "peak_mb": int(peak.split()[1]) / 1e3}))


def main() -> None:
    parser = measure.options_of(__doc__, gb=4.0)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, source, packed = options.child
        _child(name, Path(source), Path(packed))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-load-") as scratch:
        source, packed = Path(scratch, "source"), Path(scratch, "packed")
        write_checkpoint(source, llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        measure.run_quietly([*measure.RESHARD, "pack", str(source), "--layout", "pp=4", "--out", str(packed)])
        load = [measure.load_average()]
        turns = {}
        for state in ("cold", "warm"):
            measures = {name: partial(_run, name, source, packed, is_cold=state == "cold") for name in LOADERS}
            turns[state] = measure.take_turns(measures, options.runs)
    result = {
        "what": "one stage of four into its own memory, all bytes touched; whole: all four; cat: to /dev/null",
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        **{state: {name: _summary(name, turns[state]) for name in LOADERS} for state in turns},
    }
    measure.write_result(result, options.out)


def _run(name: str, source: Path, packed: Path, *, is_cold: bool) -> dict[str, float]:
    if is_cold:
        for shard in [*source.glob("*.safetensors"), *packed.glob("*/*.safetensors")]:
            with open(shard, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--child", name, str(source), str(packed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _summary(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    mine = [turn[name] for turn in turns]
    ratios = {
        f"ratio_to_{peer}": measure.median_ratio(
            (run["load_s"] for run in mine), (turn[peer]["load_s"] for turn in turns)
        )
        for peer in ("cat", "read_once")
    }
    return {
        "load_s": [round(run["load_s"], 3) for run in mine],
        "nbytes": mine[0]["nbytes"],
        "gib_per_s": round(mine[0]["nbytes"] / 2**30 / statistics.median(run["load_s"] for run in mine), 2),
        **ratios,
        "peak_resident_mb": round(max(run["peak_mb"] for run in mine)),
    }


if __name__ == "__main__":
    main()
