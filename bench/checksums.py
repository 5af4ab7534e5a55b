"""Time `reshard pack` of a torch.save checkpoint, whose CRC-32 it compares, beside the same tensors as safetensors.

    python bench/checksums.py --gb 1 --out bench/results/checksums.json [--runs 7] [--folder DIR]

It may take longer by `zlib.crc32` over the same bytes, which is timed in the same turn, in blocks as a pack reads them,
without the reading. Each turn begins with another contender.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint
from paired import Taken, pack, pack_command, ratio, run

from stores.direct_io import BLOCK_NBYTES

WIDTH = 1024
BOTH = "safetensors and crc32"


def main() -> None:
    options = measure.options_of(__doc__, gb=1.0, runs=7).parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-checksums-") as scratch:
        root = Path(scratch)
        model, bins = root / "model", root / "bins"
        nbytes = write_checkpoint(model, llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        save_bins(model, bins)
        check(model, bins, root / "checked")
        measures = {
            "bin": partial(pack, measure.ROOT, bins, root / "packed-bins"),
            "safetensors": partial(pack, measure.ROOT, model, root / "packed-model"),
            "crc32": partial(checksum, bins),
        }
        average = [measure.load_average()]
        turns = measure.take_turns(measures, options.runs)
    for turn in turns:
        parts = turn["safetensors"], turn["crc32"]
        wall_s, cpu_s = sum(part.wall_s for part in parts), sum(part.cpu_s for part in parts)
        turn[BOTH] = Taken(wall_s=round(wall_s, 4), cpu_s=round(cpu_s, 4))
    measure.write_result(
        {
            "what": "reshard pack (4 shards to 4 stages, --no-sync) of a torch.save checkpoint, of its tensors as "
            "safetensors, and zlib.crc32 over its bytes in one thread, in rotating order; warm cache; medians of "
            "ratios within a turn",
            **measure.circumstances(),
            "nbytes": nbytes,
            "load_average": [*average, measure.load_average()],
            "turns": options.runs,
            "note": "wall and processor time of whole processes, with the start of Python; crc32 without the reading; "
            "under a load average above the number of cores, only processor time means much",
            "ratios": {f"bin to {other}": ratio(turns, "bin", other) for other in ("safetensors", BOTH)},
            "taken": {"pack": [{name: asdict(taken) for name, taken in turn.items()} for turn in turns]},
        },
        options.out,
    )


def save_bins(source: Path, folder: Path) -> None:
    """Let torch save each shard, with an index as transformers writes it."""
    import torch
    from safetensors.torch import load_file

    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    names = {name: f"pytorch_{Path(name).stem}.bin" for name in sorted(set(index["weight_map"].values()))}
    for name, bin_name in names.items():
        torch.save(load_file(source / name), folder / bin_name)
    index["weight_map"] = {fqn: names[name] for fqn, name in index["weight_map"].items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def check(model: Path, bins: Path, packed: Path) -> None:
    """Check the result first: a pack has the tensors that torch saved, and refuses a file with another byte."""
    run(pack_command(bins, packed), measure.ROOT)
    measure.run_quietly([*measure.RESHARD, "verify", str(packed), "--against", str(model), "--quiet"])
    shutil.rmtree(packed)
    damaged = min(bins.glob("*.bin"))
    flip(damaged)
    ended = subprocess.run([*pack_command(bins, packed), "--json"], cwd=measure.ROOT, capture_output=True, text=True)
    if "CRC-32" not in ended.stdout:
        raise SystemExit(f"a damaged file was not refused: {ended.stdout}")
    flip(damaged)


def flip(path: Path) -> None:
    """Change the byte in the middle of a file, or change it back."""
    with open(path, "r+b") as file:
        middle = os.fstat(file.fileno()).st_size // 2
        (byte,) = os.pread(file.fileno(), 1, middle)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), middle)


def checksum(folder: Path) -> Taken:
    buffer, crc, wall_s, cpu_s = memoryview(bytearray(BLOCK_NBYTES)), 0, 0.0, 0.0
    for path in sorted(folder.glob("*.bin")):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                began_s, cpu_began_s = time.perf_counter(), time.thread_time()
                crc = zlib.crc32(buffer[:count], crc)
                wall_s, cpu_s = wall_s + time.perf_counter() - began_s, cpu_s + time.thread_time() - cpu_began_s
    return Taken(wall_s=round(wall_s, 4), cpu_s=round(cpu_s, 4))


if __name__ == "__main__":
    main()
