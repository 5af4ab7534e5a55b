"""DeepSeek-V3 at its true shape, 689 GB as sparse files: planned, packed virtually, one stage packed for real.

    python bench/deepseek.py [--runs 5] [--real] [--folder DIR] [--out bench/results/deepseek.json]

The files have real headers, and data that are holes: reading them takes no disk, but the kernel has to make
the zeros. `--real` writes the bundle of one stage of 32, 23 GB, beside `dd`, which copies files of the same kind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from sparse import write_sparse

CONFIG = Path(__file__).resolve().parents[1] / "tests" / "data" / "configs" / "deepseek-v3.json"
NUM_SHARDS = 163  # of deepseek-ai/DeepSeek-V3
NUM_STAGES = 32
STAGE = 9
RESHARD = (sys.executable, "-m", "reshard.cli")
LAYOUT = ("--layout", f"pp={NUM_STAGES}")


def main() -> None:
    options = _options()
    if options.child:
        name, path = options.child
        print(json.dumps({"list": list_with_safetensors, "own": read_own_headers}[name](Path(path))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-deepseek-") as scratch:
        source, virtual = Path(scratch, "source"), Path(scratch, "virtual")
        made = write_sparse(source, json.loads(CONFIG.read_text()), NUM_SHARDS)
        pack = [*RESHARD, "pack", str(source), *LAYOUT, "--virtual", "--force", "--out", str(virtual)]
        subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
        check_spans(virtual, source)
        commands = {
            "plan": [*RESHARD, "plan", str(source), *LAYOUT],
            "pack_virtual": pack,
            "plan_of_virtual": [*RESHARD, "plan", str(virtual)],
            "verify_quick": [*RESHARD, "verify", str(virtual), "--quick"],
            "safe_open": [sys.executable, __file__, "--child", "list", str(source)],
        }
        turns = [{name: _run(command) for name, command in commands.items()} for _ in range(options.runs + 1)][1:]
        own = [sys.executable, __file__, "--child", "own", str(virtual)]
        own_s = json.loads(subprocess.run(own, check=True, capture_output=True, text=True).stdout)
        result = {
            "what": f"DeepSeek-V3's true shape in sparse files, onto {NUM_STAGES} stages; warm cache; safe_open: the "
            "safetensors library lists names, dtypes and shapes of the same files",
            "date": date.today().isoformat(),
            "commit": _commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "num_tensors": made.num_tensors,
            "num_shards": made.num_shards,
            "nbytes": made.nbytes,
            "manifest_nbytes": (virtual / "manifest.json").stat().st_size,
            "turns": options.runs,
            "commands": {name: _summary(name, turns) for name in commands},
            "own_headers_s": {"median": round(statistics.median(own_s), 3), "max": round(max(own_s), 3)},
        }
        if options.real:
            result["one_stage"] = pack_one_stage(source, Path(scratch))
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out:
        Path(options.out).write_text(text)


def check_spans(virtual: Path, source: Path) -> None:
    """The result first, then the time: the stages' spans cover every byte of every file's data once."""
    manifest = json.loads((virtual / "manifest.json").read_text())
    spans: dict[int, list[tuple[int, int]]] = {}
    for span in (span for stage in manifest["stages"] for span in stage["spans"]):
        spans.setdefault(span["file"], []).append((span["begin"], span["end"]))
    assert len(spans) == len(list(source.glob("*.safetensors"))) == NUM_SHARDS
    for number, pinned in enumerate(manifest["virtual"]["files"]):
        with open(source / pinned["path"], "rb") as file:
            position = 8 + int.from_bytes(file.read(8), "little")
        for begin, end in sorted(spans[number]):
            assert begin == position, (pinned["path"], begin, position)
            position = end
        assert position == (source / pinned["path"]).stat().st_size
    index = json.loads((source / "model.safetensors.index.json").read_text())
    assert sum(stage["num_tensors"] for stage in manifest["stages"]) == len(index["weight_map"])


def list_with_safetensors(source: Path) -> int:
    """Give the number of tensors of which the safetensors library has said name, dtype and shape."""
    from safetensors import safe_open

    found = []
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found.append((name, part.get_dtype(), part.get_shape()))
    return len(found)


def read_own_headers(virtual: Path) -> list[float]:
    """Give the seconds that the rank of each stage takes from the manifest to all it needs to know to read."""
    from manifests.store import read_manifest
    from stores.bundles import Bundles

    took_s = []
    for index in range(NUM_STAGES):
        began_s = time.perf_counter()
        manifest = read_manifest(virtual)
        tensors = Bundles(manifest, virtual).tensors_on(manifest.stages[index])
        took_s.append(time.perf_counter() - began_s)
        assert len(tensors) == manifest.stages[index].num_tensors
    return took_s


def pack_one_stage(source: Path, scratch: Path) -> dict[str, Any]:
    """Write one stage's bundle and read it back; then copy five other shards with dd, cold and direct alike."""
    out, copied = scratch / "one", scratch / "copied"
    pack = [*RESHARD, "pack", str(source), *LAYOUT, "--stages", str(STAGE), "--out", str(out), "--quiet"]
    packed = _run(pack)
    verify = [*RESHARD, "verify", str(out), "--stage", str(STAGE), "--quiet", "--json"]
    done = json.loads(subprocess.run(verify, check=True, capture_output=True, text=True).stdout)
    assert done["equal"]
    assert done["compared_nbytes"] == done["nbytes"]
    (shard,) = out.rglob("*.safetensors")
    nbytes = shard.stat().st_size
    shard.unlink()
    others = sorted(source.glob("*.safetensors"))[-6:-1]
    dd = f"cat {' '.join(map(str, others))} | dd of={copied} bs=1M iflag=fullblock oflag=direct conv=fsync"
    written = _run(["sh", "-c", dd])
    ratio = packed["wall_s"] / nbytes / (written["wall_s"] / copied.stat().st_size)
    copied.unlink()
    return {
        "stage": STAGE,
        "num_tensors": done["num_tensors"],
        "nbytes": nbytes,
        "wall_s": round(packed["wall_s"], 1),
        "gib_per_s": round(nbytes / 2**30 / packed["wall_s"], 2),
        "ratio_to_dd_per_byte": round(ratio, 2),
        "peak_anonymous_mb": round(packed["anonymous_nbytes"] / 1e6),
    }


def _run(command: list[str]) -> dict[str, float]:
    """Run a command, and give its wall time and the most anonymous memory it was seen with."""
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        most = max(most, _anonymous_nbytes(process.pid))
        time.sleep(0.005)
    wall_s = time.perf_counter() - began_s
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return {"wall_s": wall_s, "anonymous_nbytes": most}


def _anonymous_nbytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def _summary(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    ratio = statistics.median(turn[name]["wall_s"] / turn["safe_open"]["wall_s"] for turn in turns)
    return {
        "wall_s": [round(turn[name]["wall_s"], 2) for turn in turns],
        "median_s": round(statistics.median(turn[name]["wall_s"] for turn in turns), 2),
        "ratio_to_safe_open": round(ratio, 2),
        "peak_anonymous_mb": round(max(turn[name]["anonymous_nbytes"] for turn in turns) / 1e6),
    }


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--real", action="store_true", help="pack one stage, 23 GB, as well")
    parser.add_argument("--folder", help="where to put the scratch folder")
    parser.add_argument("--out")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
