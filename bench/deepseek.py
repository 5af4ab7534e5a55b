"""DeepSeek-V3 at its true shape, 689 GB as sparse files: planned, packed virtually, one stage packed for real.

    python bench/deepseek.py [--runs 5] [--real] [--folder DIR] [--out bench/results/deepseek.json]
    python bench/deepseek.py --megatron [--runs 5] [--folder DIR] [--out bench/results/deepseek-megatron.json]

The files have real headers and sparse data: reading them needs no disk, but the kernel must produce the zeros.
`--real` writes the bundle of one of 32 stages, 23 GB, and compares with `dd`, which copies files of the same kind.
`--megatron` plans from a `torch_dist` checkpoint of Megatron-Core in BF16, 1.3 TB, and has torch read its metadata.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from sparse import write_sparse

from manifests.models import model_shape

CONFIG = measure.ROOT / "tests" / "data" / "configs" / "deepseek-v3.json"
NUM_SHARDS = 163  # of deepseek-ai/DeepSeek-V3
NUM_STAGES = 32
STAGE = 9
NUM_RANKS = 128  # of the Megatron-Core checkpoint
LAYOUT = ("--layout", f"pp={NUM_STAGES}")


def main() -> None:
    parser = measure.options_of(__doc__)
    parser.add_argument("--real", action="store_true", help="also pack one stage, 23 GB")
    parser.add_argument("--megatron", action="store_true", help="plan from a checkpoint of Megatron-Core instead")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, path = options.child
        children = {"list": list_with_safetensors, "own": read_own_headers, "metadata": read_metadata_with_torch}
        print(json.dumps(children[name](Path(path))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-deepseek-") as scratch:
        if options.megatron:
            measure.write_result(plan_megatron(Path(scratch, "iter_0000001"), options.runs), options.out)
            return
        source, virtual = Path(scratch, "source"), Path(scratch, "virtual")
        made = write_sparse(source, json.loads(CONFIG.read_text()), NUM_SHARDS)
        pack = [*measure.RESHARD, "pack", str(source), *LAYOUT, "--virtual", "--force", "--out", str(virtual)]
        measure.run_quietly(pack)
        check_spans(virtual, source)
        commands = {
            "plan": [*measure.RESHARD, "plan", str(source), *LAYOUT],
            "pack_virtual": pack,
            "plan_of_virtual": [*measure.RESHARD, "plan", str(virtual)],
            "verify_quick": [*measure.RESHARD, "verify", str(virtual), "--quick"],
            "safe_open": [sys.executable, __file__, "--child", "list", str(source)],
        }
        turns = measure.take_turns(
            {name: partial(measure.run_measured, command) for name, command in commands.items()}, options.runs
        )
        own = [sys.executable, __file__, "--child", "own", str(virtual)]
        own_s = json.loads(subprocess.run(own, check=True, capture_output=True, text=True).stdout)
        result = {
            "what": f"DeepSeek-V3's true shape in sparse files, onto {NUM_STAGES} stages; warm cache; safe_open: the "
            "safetensors library lists names, dtypes and shapes of the same files",
            **measure.circumstances(),
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
    measure.write_result(result, options.out)


def plan_megatron(folder: Path, num_turns: int) -> dict[str, Any]:
    """Return what planning from a checkpoint of Megatron-Core takes, beside what torch takes to read its metadata."""
    from sparse_megatron import write_sparse_megatron

    config = {key: value for key, value in json.loads(CONFIG.read_text()).items() if key != "quantization_config"}
    made = write_sparse_megatron(folder, config, NUM_RANKS)
    pack = [*measure.RESHARD, "pack", str(folder), *LAYOUT, "--out", str(folder.with_name("packed")), "--dry-run"]
    commands = {
        "plan": [*measure.RESHARD, "plan", str(folder), *LAYOUT],
        "pack_dry_run": pack,
        "torch_reads_metadata": [sys.executable, __file__, "--child", "metadata", str(folder)],
    }
    planned = json.loads(subprocess.run([*pack, "--json"], check=True, capture_output=True, text=True).stdout)
    shape = model_shape(config)
    assert sum(stage["params"] for stage in planned["stages"]) == shape.num_params
    runs = {name: partial(measure.run_measured, command) for name, command in commands.items()}
    turns = measure.take_turns(runs, num_turns)
    return {
        "what": f"DeepSeek-V3's true shape as Megatron-Core's torch_dist of {NUM_RANKS} ranks in sparse files, onto "
        f"{NUM_STAGES} stages; warm cache; torch_reads_metadata: FileSystemReader.read_metadata, with its imports",
        **measure.circumstances(),
        "num_tensors": len(shape.tensors),
        "num_chunks": made.num_chunks,
        "nbytes": made.nbytes,
        "metadata_nbytes": made.metadata_nbytes,
        "turns": num_turns,
        "commands": {name: measure.summary([turn[name] for turn in turns]) for name in commands},
    }


def read_metadata_with_torch(folder: Path) -> int:
    """Return the number of entries that torch found."""
    from torch.distributed.checkpoint import FileSystemReader

    return len(FileSystemReader(folder).read_metadata().state_dict_metadata)


def check_spans(virtual: Path, source: Path) -> None:
    """Check the result first: the stages' spans cover every byte of every file's data exactly once."""
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
    """Return the number of tensors whose name, dtype and shape the safetensors library listed."""
    from safetensors import safe_open

    found = []
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found.append((name, part.get_dtype(), part.get_shape()))
    return len(found)


def read_own_headers(virtual: Path) -> list[float]:
    """Return the seconds that each stage's rank needs to go from the manifest to its list of byte ranges."""
    from stores.bundles import Bundles
    from stores.open import open_manifest

    took_s = []
    for index in range(NUM_STAGES):
        began_s = time.perf_counter()
        manifest = open_manifest(virtual).manifest
        tensors = Bundles(manifest, virtual).tensors_on(manifest.stages[index])
        took_s.append(time.perf_counter() - began_s)
        assert len(tensors) == manifest.stages[index].num_tensors
    return took_s


def pack_one_stage(source: Path, scratch: Path) -> dict[str, Any]:
    """Write one stage's bundle and read it back; then copy five other shards with dd, also cold and with direct I/O."""
    out, copied = scratch / "one", scratch / "copied"
    pack = [*measure.RESHARD, "pack", str(source), *LAYOUT, "--stages", str(STAGE), "--out", str(out), "--quiet"]
    packed = measure.run_measured(pack)
    verify = [*measure.RESHARD, "verify", str(out), "--stage", str(STAGE), "--quiet", "--json"]
    done = json.loads(subprocess.run(verify, check=True, capture_output=True, text=True).stdout)
    assert done["equal"]
    assert done["compared_nbytes"] == done["nbytes"]
    (shard,) = out.rglob("*.safetensors")
    nbytes = shard.stat().st_size
    shard.unlink()
    others = sorted(source.glob("*.safetensors"))[-6:-1]
    dd = f"cat {' '.join(map(str, others))} | dd of={copied} bs=1M iflag=fullblock oflag=direct conv=fsync"
    written = measure.run_measured(["sh", "-c", dd])
    ratio = packed.wall_s / nbytes / (written.wall_s / copied.stat().st_size)
    copied.unlink()
    return {
        "stage": STAGE,
        "num_tensors": done["num_tensors"],
        "nbytes": nbytes,
        "wall_s": round(packed.wall_s, 1),
        "gib_per_s": round(nbytes / 2**30 / packed.wall_s, 2),
        "ratio_to_dd_per_byte": round(ratio, 2),
        "peak_anonymous_mb": round(packed.anonymous_nbytes / 1e6),
    }


def _summary(name: str, turns: list[dict[str, measure.Run]]) -> dict[str, object]:
    ratio = measure.median_ratio((turn[name].wall_s for turn in turns), (turn["safe_open"].wall_s for turn in turns))
    return {**measure.summary([turn[name] for turn in turns]), "ratio_to_safe_open": ratio}


if __name__ == "__main__":
    main()
