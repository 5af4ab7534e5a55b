"""Time `reshard pack` beside `cp -r` of the same folder, run by run, and write the result as JSON.

    python bench/pack.py --gb 4 --peers --out bench/results/pack-4gb.json [--runs 5] [--folder DIR]

Like is compared with like: a pack that ends when the bytes are on the disk with `cp` and a flush of what it wrote,
one that leaves the flushing to the kernel (--no-sync) with a bare `cp`. The peers flush nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkpoints import llama_config, write_checkpoint

WIDTH = 2048
PEERS = ("script", "transformers", "dcp")
PEERS_SCRIPT = Path(__file__).with_name("peers.py")
LAYER_NBYTES = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 4 + 3 * 7 * WIDTH * WIDTH // 2)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-pack-") as scratch:
        root = Path(scratch)
        source = root / "source"
        num_layers = max(4, round((options.gb * 1e9 - 4 * 32000 * WIDTH) / LAYER_NBYTES))
        nbytes = write_checkpoint(source, llama_config(num_layers, WIDTH), num_shards=4)
        reshard = [sys.executable, "-m", "reshard.cli"]
        packed, copied = root / "packed", root / "copied"
        pack = [*reshard, "pack", str(source), "--layout", "pp=4", "--out", str(packed), "--quiet"]
        copy = ["cp", "-r", str(source), str(copied)]
        _check(reshard, pack, source, root)
        commands = {
            "pack": (pack, packed),
            "cp_and_sync": (["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', str(source), str(copied)], copied),
            "pack_no_sync": ([*pack, "--no-sync"], packed),
            "pack_no_sync_buffered": ([*pack, "--no-sync", "--io", "buffered"], packed),
            "cp": (copy, copied),
        }
        if options.peers:
            for peer in PEERS:
                out = root / peer
                commands[peer] = ([sys.executable, str(PEERS_SCRIPT), peer, str(source), str(out)], out)
        load = [os.getloadavg()[0]]
        turns = [{name: _run(*command) for name, command in commands.items()} for _ in range(options.runs + 1)][1:]
    result = {
        "what": "reshard pack, 4 shards to 4 stages with digests, and cp -r, in turn; warm cache; medians of ratios "
        "within a turn",
        "date": date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "nbytes": nbytes,
        "load_average": [round(found, 2) for found in (*load, os.getloadavg()[0])],
        "turns": options.runs,
        "pack_gib_per_s": round(nbytes / 2**30 / statistics.median(turn["pack"]["wall_s"] for turn in turns), 2),
        "ratios": {
            "pack to cp_and_sync": _ratio("pack", "cp_and_sync", turns),
            "pack_no_sync to cp": _ratio("pack_no_sync", "cp", turns),
            "pack_no_sync_buffered to cp": _ratio("pack_no_sync_buffered", "cp", turns),
            "pack to cp": _ratio("pack", "cp", turns),
        },
        "commands": {name: _summary(name, turns) for name in commands},
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out:
        Path(options.out).write_text(text)


def _summary(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    """Give a command's times, its time over that of cp in the same turn, and its memory."""
    return {
        "wall_s": [round(turn[name]["wall_s"], 3) for turn in turns],
        "median_s": round(statistics.median(turn[name]["wall_s"] for turn in turns), 3),
        "ratio_to_cp": _ratio(name, "cp", turns),
        "peak_anonymous_mb": round(max(turn[name]["anonymous_nbytes"] for turn in turns) / 1e6, 1),
    }


def _ratio(name: str, other: str, turns: list[dict[str, dict[str, float]]]) -> float:
    """Give the median over the turns of a command's time over another's in the same turn."""
    return round(statistics.median(turn[name]["wall_s"] / turn[other]["wall_s"] for turn in turns), 3)


def _check(reshard: list[str], pack: list[str], source: Path, root: Path) -> None:
    """The result first, then the time: an export of the pack is the source, byte for byte."""
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    back = root / "back"
    export = [*reshard, "export", str(root / "packed"), "--to", "hf", "--out", str(back), "--quiet"]
    subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["diff", "-r", str(source), str(back)], check=True)
    shutil.rmtree(back)
    shutil.rmtree(root / "packed")


def _run(command: list[str], out: Path) -> dict[str, float]:
    """Run a command, and give its wall time and the most anonymous memory it was seen with."""
    started_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        most = max(most, _anonymous_nbytes(process.pid))
        time.sleep(0.005)
    wall_s = time.perf_counter() - started_s
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    shutil.rmtree(out)
    os.sync()  # what one run left to write is not for the next one to wait for
    return {"wall_s": wall_s, "anonymous_nbytes": most}


def _anonymous_nbytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="time what people do today as well")
    parser.add_argument("--folder", help="where to put the scratch folder")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
