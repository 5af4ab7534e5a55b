"""Measure deltas: how many weights change in a step of training, and publish and apply beside other ways.

    python bench/delta.py density --out bench/results/delta-density.json [--steps 5]
    python bench/delta.py speed --gb 4 --out bench/results/delta.json [--runs 5]

density: the demo's model, trained at 3e-3 for 30 steps, is trained on at each of three learning rates, and each step is
published in bf16: the fraction of elements and bytes that change, and zstd's ratio at several levels. What it prints
does not depend on how busy the machine is.

speed: a checkpoint in four shards, in three of which 2 % of the elements change. Publish, with a copy of the version
before, beside one read of both, and one read and BLAKE3 of both; apply beside a read and a write of the shards that
differ; and a full copy, `rsync --inplace` and `zstd --patch-from`, which are required. Turn by turn, rotated, with
pauses; files are in the page cache, unless the name says cold, and every writer ends with its bytes on disk.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

RATES = (1e-6, 1e-5, 1e-4)
LEVELS = (1, 3, 9, 19)
SHARE = 0.02  # of the elements that change
NUM_SHARDS, PAUSE_S = 4, 2.0
HASH = "import sys, blake3\nfor path in sys.argv[1:]: blake3.blake3(max_threads=-1).update_mmap(path).digest()"
BATCH = ("--seq-len", 128, "--global-batch", 32, "--microbatch", 4)


def main() -> None:
    parser = measure.options_of(__doc__, gb=4.0)
    parser.add_argument("what", choices=["density", "speed"])
    parser.add_argument("--steps", type=int, default=5, help="steps at each learning rate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-delta-") as scratch:
        root = Path(scratch)
        result = density(root, options.steps) if options.what == "density" else speed(root, options.gb, options.runs)
    measure.write_result({**result, **measure.circumstances()}, options.out)


def density(root: Path, num_steps: int) -> dict[str, object]:
    """Train at each rate, and compare the weights of consecutive steps in bf16."""
    subprocess.run([sys.executable, measure.ROOT / "demo/make_model.py", root], check=True, stdout=subprocess.DEVNULL)
    reshard("pack", root / "model", "--layout", "pp=2", "--out", root / "pp2")
    train(root, "pp2", "--steps", 30, "--lr", 3e-3, "--warmup-steps", 5, "--save", root / "trained")
    rows = []
    for rate in RATES:
        steps = root / f"steps-{rate}"
        flags = (
            "--lr",
            rate,
            "--warmup-steps",
            0,
            "--decay",
            "constant",
            "--checkpoint",
            steps,
            "--checkpoint-every",
            1,
        )
        train(root, "trained", "--steps", num_steps, *flags, "--checkpoint-every", 1)
        states = [bf16_in(path, root / "hf") for path in sorted(steps.glob("step-*"))]
        chain = root / f"chain-{rate}"
        published = [
            json.loads(reshard("delta", "publish", path, "--chain", chain, "--dtype", "bf16", "--json"))
            for path in sorted(steps.glob("step-*"))
        ]
        assert [done["base"] for done in published[1:]] == [done["number"] for done in published[:-1]], "deltas"
        old, new = states[-2:]
        difference = old ^ new
        raw = difference.tobytes()
        rows.append(
            {
                "lr": rate,
                "elements_changed": round(float(np.count_nonzero(difference)) / len(difference), 5),
                "bytes_changed": round(float(np.count_nonzero(difference.view(np.uint8))) / len(raw), 5),
                "delta_nbytes": published[-1]["nbytes"],
                "state_nbytes": len(raw),
                "zstd_of_state": {
                    str(level): round(len(zstandard.ZstdCompressor(level=level).compress(raw)) / len(raw), 5)
                    for level in LEVELS
                },
            }
        )
    what = "bf16 weights of the demo's model between the last two steps of a new AdamW, after 30 at 3e-3"
    return {"what": what, "rows": rows}


def train(root: Path, packed: str, *flags: object) -> None:
    data = ("--data", root / "text/train.jsonl", "--log-dir", root / "log")
    measure.run_runner("launch", root / packed, "--nproc-per-node", 2, "--", *BATCH, *data, *flags)


def bf16_in(step: Path, out: Path) -> np.ndarray:
    """Return the weights of a checkpoint in bf16, as bits, one tensor after the other by name."""
    from safetensors import safe_open

    shutil.rmtree(out, ignore_errors=True)
    reshard("export", step, "--to", "hf", "--dtype", "bf16", "--out", out)
    index = out / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] if index.exists() else None
    shards = sorted({*names.values()} if names else {"model.safetensors"})
    tensors = {}
    for shard in shards:
        with safe_open(out / shard, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    import torch

    return np.concatenate([tensors[name].view(torch.uint16).numpy().ravel() for name in sorted(tensors)])


def speed(root: Path, gb: float, num_turns: int) -> dict[str, object]:
    old, new, chain, served = root / "old", root / "new", root / "chain", root / "served"
    nbytes = write_checkpoint(old, llama_of(gb * 1e9 / 2, 1024, least_layers=4), num_shards=NUM_SHARDS)
    shutil.copytree(old, new)
    differing = change(new)
    shutil.copytree(old, served)
    delta(root, "publish", old, "--chain", chain)
    publish = ("publish", new, "--chain", chain, "--base", old, "--quiet")
    delta(root, *publish)
    delta_nbytes = sum(path.stat().st_size for path in (chain / "weight_v000002").iterdir())
    done = json.loads(reshard("delta", "apply", chain, "--to", served, "--json"))
    assert done["write_nbytes"] < 1.001 * sum(path.stat().st_size for path in differing), "only what differs"
    assert same_weights(served, new)
    verified_s = list[float]()

    def publish_again() -> measure.Run:
        shutil.rmtree(chain / "weight_v000002")
        return delta(root, *publish)

    def cold(run: Callable[[], measure.Run]) -> measure.Run:
        for path in files:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return run()

    def read_both() -> measure.Run:
        return shell(None, f"cat {words(files)} > /dev/null")

    def apply(version: int) -> measure.Run:
        flags = ("--to", served, "--version", version, "--json")
        run = delta(root, "apply", chain, *flags)
        if version == 2:
            verified_s.append(json.loads((root / "printed").read_text())["verify_s"])
        return run

    files, shards = [*old.glob("*.safetensors"), *new.glob("*.safetensors")], sorted(new.glob("*.safetensors"))
    copy = root / "copy"
    measures = {
        "apply": lambda: apply(2),
        "apply back to the full version": lambda: apply(1),
        "copy of what differs": lambda: shell(copy, f"mkdir {copy}; cp {words(differing)} {copy}; sync -f {copy}"),
        "publish": publish_again,
        "read both": read_both,
        "BLAKE3 of both": lambda: measure.run_measured([sys.executable, "-c", HASH, *map(str, files)]),
        "publish, cold": lambda: cold(publish_again),
        "read both, cold": lambda: cold(read_both),
        "full copy": lambda: shell(copy, f"cp -r {new} {copy}; sync -f {copy}"),
        "rsync --inplace": lambda: rsynced(root, old, new),
        "zstd --patch-from": lambda: shell(
            copy,
            f"mkdir {copy}\n"
            + "\n".join(f"zstd -q -1 --long=31 --patch-from {old / shard.name} {shard} -o {copy / shard.name}.zst"
                        for shard in shards),
        ),
    }  # fmt: skip
    turns = measure.take_turns(measures, num_turns, pause_s=PAUSE_S)

    def ratios(ours: str, theirs: str) -> dict[str, float]:
        pairs = [(turn[ours], turn[theirs]) for turn in turns]
        wall = measure.median_ratio((a.wall_s for a, _ in pairs), (b.wall_s for _, b in pairs))
        return {"wall": wall, "cpu": measure.median_ratio((a.cpu_s for a, _ in pairs), (b.cpu_s for _, b in pairs))}

    return {
        "what": f"{gb} GB in {NUM_SHARDS} shards, of all of which but one {SHARE:.0%} of the elements change",
        "nbytes": nbytes,
        "delta_nbytes": delta_nbytes,
        "differing_nbytes": sum(path.stat().st_size for path in differing),
        **{name: measure.summary([turn[name] for turn in turns]) for name in measures},
        "apply_verify_of_the_rest_s": [round(seconds, 3) for seconds in verified_s[1:]],
        "publish_of_read_both_cold": ratios("publish, cold", "read both, cold"),
        "publish_of_read_both": ratios("publish", "read both"),
        "publish_of_blake3_of_both": ratios("publish", "BLAKE3 of both"),
        "apply_of_copy_of_what_differs": ratios("apply", "copy of what differs"),
        "apply_of_full_copy": ratios("apply", "full copy"),
        "apply_of_rsync": ratios("apply", "rsync --inplace"),
        "publish_of_zstd": ratios("publish", "zstd --patch-from"),
    }  # fmt: skip


def change(folder: Path) -> list[Path]:
    """Flip the lowest bit of 2 % of the bf16 elements of each shard but the last, at random; return these shards."""
    generator = np.random.default_rng(0)
    shards = sorted(folder.glob("*.safetensors"))[:-1]
    for shard in shards:
        first = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
        data = np.memmap(shard, np.uint8, "r+", offset=first)
        elements = data[: len(data) // 2 * 2].view(np.uint16)
        for begin in range(0, len(elements), 1 << 24):
            part = elements[begin : begin + (1 << 24)]
            part ^= (generator.random(len(part), np.float32) < SHARE).astype(np.uint16)
        data.flush()
    return shards


def same_weights(folder: Path, other: Path) -> bool:
    return bool(json.loads(reshard("diff", folder, other, "--json"))["equal"])


def delta(root: Path, *arguments: object) -> measure.Run:
    """Run a command of `reshard delta`; what it prints is in the file `printed`."""
    command = " ".join(map(shlex.quote, [*measure.RESHARD, "delta", *map(str, arguments)]))
    return measure.run_measured(["bash", "-c", f"exec {command} > {root / 'printed'}"])


def shell(out: Path | None, script: str) -> measure.Run:
    return measure.run_measured(["bash", "-euc", script], out)


def words(paths: Iterable[Path]) -> str:
    return " ".join(map(str, paths))


def rsynced(root: Path, old: Path, new: Path) -> measure.Run:
    shutil.copytree(old, root / "rsync")
    command = f"rsync -r --inplace --no-whole-file {new}/ {root}/rsync/; sync -f {root}/rsync"
    return shell(root / "rsync", command)


def reshard(*arguments: object) -> str:
    command = [*measure.RESHARD, *map(str, arguments)]
    return subprocess.run(command, check=True, cwd=measure.ROOT, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
