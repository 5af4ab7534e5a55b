"""Time a reshard of a training checkpoint, weights and Adam's moments, from 8 stages to 4, and write it as JSON.

    python bench/resharding.py --gb 4 --out bench/results/reshard-4gb.json [--runs 5] [--folder DIR]

Like is compared with like: a reshard that ends when the bytes are on the disk with `cp -r` and a flush of what it
wrote, one that leaves the flushing to the kernel with a bare `cp -r`. The peer reads the same state as a checkpoint of
torch.distributed.checkpoint into one process, as plain tensors, and saves it again; it flushes nothing.
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
from dataclasses import replace
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from checkpoints import llama_config, write_checkpoint

from manifests.schema import MOMENTS, OptimizerState, ParameterGroup, Stage, TrainingState
from manifests.store import read_manifest, write_manifest

WIDTH = 1024
BYTES_PER_PARAMETER = 12  # in float32: the weight and two moments
LAYER_PARAMS = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 4 + 3 * 7 * WIDTH * WIDTH // 2
RESHARD = [sys.executable, "-m", "reshard.cli"]
PEERS_SCRIPT = Path(__file__).with_name("peers.py")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-reshard-") as scratch:
        root = Path(scratch)
        nbytes = write_trained(root, options.gb)
        trained, copied, resharded = root / "trained", root / "copied", root / "resharded"
        pack = [*RESHARD, "pack", str(trained), "--layout", "pp=4", "--out", str(resharded), "--quiet"]
        check(pack, trained, resharded)
        subprocess.run([sys.executable, str(PEERS_SCRIPT), "dcp-save", str(trained), str(root / "dcp")], check=True)
        flush = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
        commands = {
            "reshard": (pack, resharded),
            "cp_and_sync": (["sh", "-c", flush, str(trained), str(copied)], copied),
            "reshard_no_sync": ([*pack, "--no-sync"], resharded),
            "cp": (["cp", "-r", str(trained), str(copied)], copied),
            "dcp": ([sys.executable, str(PEERS_SCRIPT), "dcp-again", str(root / "dcp"), str(copied)], copied),
        }
        load = [os.getloadavg()[0]]
        turns = [{name: _run(*command) for name, command in commands.items()} for _ in range(options.runs + 1)][1:]
    result = {
        "what": "reshard pack of a checkpoint with Adam's moments, 8 stages to 4, digests checked; cp -r; and DCP "
        "loading and saving the state in one process; in turn, warm cache; medians of ratios within a turn",
        "date": date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "nbytes": nbytes,
        "load_average": [round(found, 2) for found in (*load, os.getloadavg()[0])],
        "turns": options.runs,
        "gib_per_s": round(nbytes / 2**30 / statistics.median(turn["reshard"]["wall_s"] for turn in turns), 2),
        "ratios": {
            "reshard to cp_and_sync": _ratio("reshard", "cp_and_sync", "wall_s", turns),
            "reshard_no_sync to cp": _ratio("reshard_no_sync", "cp", "wall_s", turns),
            "reshard to cp": _ratio("reshard", "cp", "wall_s", turns),
            "dcp to reshard": _ratio("dcp", "reshard", "wall_s", turns),
            "dcp to reshard, anonymous memory": _ratio("dcp", "reshard", "anonymous_nbytes", turns),
        },
        "commands": {name: _summary(name, turns) for name in commands},
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out:
        Path(options.out).write_text(text)


def write_trained(root: Path, gb: float) -> int:
    """Write a training checkpoint of 8 stages below `root`, its moments with the weights' bytes; give its bytes."""
    num_layers = max(8, round((gb * 1e9 / BYTES_PER_PARAMETER - 2 * 32000 * WIDTH) / LAYER_PARAMS))
    source, trained = root / "source", root / "trained"
    write_checkpoint(source, llama_config(num_layers, WIDTH), num_shards=2, dtype="F32")
    pack = [*RESHARD, "pack", str(source), "--layout", "pp=8", "--out", str(trained), "--quiet"]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(source)
    manifest = read_manifest(trained)
    group = ParameterGroup(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    state = TrainingState(
        step=100, num_tokens=0, dtype="F32", optimizer=OptimizerState(name="AdamW", max_norm=1.0, groups=(group,))
    )
    stages = tuple(_with_moments(stage, trained) for stage in manifest.stages)
    write_manifest(trained, replace(manifest, stages=stages, training=state))
    return sum(path.stat().st_size for path in trained.rglob("*.safetensors"))


def check(pack: list[str], trained: Path, resharded: Path) -> None:
    """The result first, then the time: every tensor is that of the parent."""
    for command in (pack, [*RESHARD, "verify", str(resharded), "--against", str(trained), "--quiet"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(resharded)


def _with_moments(stage: Stage, trained: Path) -> Stage:
    (weights,) = stage.shards
    shards = [weights]
    for holds in MOMENTS:
        path = Path(weights.path).parent / holds / "model.safetensors"
        (trained / path).parent.mkdir()
        shutil.copyfile(trained / weights.path, trained / path)
        shards.append(replace(weights, path=path.as_posix(), holds=holds))
    return replace(stage, shards=tuple(shards))


def _summary(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    return {
        "wall_s": [round(turn[name]["wall_s"], 3) for turn in turns],
        "median_s": round(statistics.median(turn[name]["wall_s"] for turn in turns), 3),
        "peak_anonymous_mb": round(max(turn[name]["anonymous_nbytes"] for turn in turns) / 1e6, 1),
    }


def _ratio(name: str, other: str, what: str, turns: list[dict[str, dict[str, float]]]) -> float:
    """Give the median over the turns of a command's time or memory over another's in the same turn."""
    return round(statistics.median(turn[name][what] / max(turn[other][what], 1e-9) for turn in turns), 3)


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
        raise SystemExit(f"{command[:3]} ended with {process.returncode}")
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
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", help="where to put the scratch folder")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
