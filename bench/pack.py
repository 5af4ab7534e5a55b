"""Time `reshard pack` beside `cp -r` of the same folder, run by run, and write the result as JSON.

    python bench/pack.py --gb 4 --peers --out bench/results/pack-4gb.json [--runs 5] [--folder DIR]

Like is compared with like: a pack that waits for the disk with `cp` and a flush of what it wrote, one that leaves
flushing to the kernel (--no-sync) with a bare `cp`; the export gives the source's bytes back. The peers flush nothing;
mergekit is one where it is installed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

WIDTH = 2048
PEERS = ("script", "transformers", "dcp", *(["mergekit"] if find_spec("mergekit") else []))
PEERS_SCRIPT = Path(__file__).with_name("peers.py")


def main() -> None:
    parser = measure.options_of(__doc__, gb=2.0)
    parser.add_argument("--peers", action="store_true", help="also time the peers")
    parser.add_argument("--full-cache", action="store_true", help="fill the page cache before each command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-pack-") as scratch:
        root = Path(scratch)
        source = root / "source"
        nbytes = write_checkpoint(source, llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4), num_shards=4)
        packed, copied, back = root / "packed", root / "copied", root / "back"
        pack = [*measure.RESHARD, "pack", str(source), "--layout", "pp=4", "--out", str(packed), "--quiet"]
        copy = ["cp", "-r", str(source), str(copied)]
        kept = root / "kept"
        export = [*measure.RESHARD, "export", str(kept), "--to", "hf", "--out", str(back), "--quiet"]
        measure.run_quietly(pack)
        packed.rename(kept)
        measure.run_quietly(export)
        subprocess.run(["diff", "-r", str(source), str(back)], check=True)
        shutil.rmtree(back)
        commands = {
            "pack": (pack, packed),
            "cp_and_sync": (["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', str(source), str(copied)], copied),
            "export": (export, back),
            "pack_buffered": ([*pack, "--io", "buffered"], packed),
            "pack_no_sync": ([*pack, "--no-sync"], packed),
            "pack_no_sync_buffered": ([*pack, "--no-sync", "--io", "buffered"], packed),
            "cp": (copy, copied),
        }
        if options.peers:
            for peer in PEERS:
                out = root / peer
                commands[peer] = ([sys.executable, str(PEERS_SCRIPT), peer, str(source), str(out)], out)
        load = [measure.load_average()]
        full = root / "full" if options.full_cache else None
        measures = {name: partial(run, full, *command) for name, command in commands.items()}
        turns = measure.take_turns(measures, options.runs)
    result = {
        "what": "reshard pack, 4 shards to 4 stages with digests, its export, and cp -r, in turn; warm cache; medians "
        "of ratios within a turn",
        **measure.circumstances(),
        "nbytes": nbytes,
        "page_cache": "full" if options.full_cache else "free memory",
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        "pack_gib_per_s": round(nbytes / 2**30 / statistics.median(turn["pack"].wall_s for turn in turns), 2),
        "ratios": {
            "pack to cp_and_sync": _ratio("pack", "cp_and_sync", turns),
            "export to cp_and_sync": _ratio("export", "cp_and_sync", turns),
            "pack_buffered to cp_and_sync": _ratio("pack_buffered", "cp_and_sync", turns),
            "pack_no_sync to cp": _ratio("pack_no_sync", "cp", turns),
            "pack_no_sync_buffered to cp": _ratio("pack_no_sync_buffered", "cp", turns),
            "pack to cp": _ratio("pack", "cp", turns),
        },
        "commands": {
            name: {**measure.summary([turn[name] for turn in turns]), "ratio_to_cp": _ratio(name, "cp", turns)}
            for name in commands
        },
    }
    measure.write_result(result, options.out)


def run(full: Path | None, command: list[str], out: Path) -> measure.Run:
    """Run a command, after filling the page cache with the holes of a sparse file if there is one."""
    if full is not None:
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        full.touch()
        os.truncate(full, nbytes)
        measure.run_quietly(["cat", str(full)])
    return measure.run_measured(command, out)


def _ratio(name: str, other: str, turns: list[dict[str, measure.Run]]) -> float:
    """Return the ratio of two commands' times."""
    return measure.median_ratio((turn[name].wall_s for turn in turns), (turn[other].wall_s for turn in turns))


if __name__ == "__main__":
    main()
