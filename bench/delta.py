"""Measure deltas: how many weights change in a step of training, and publish and apply beside other ways.

    python bench/delta.py density --out bench/results/delta-density.json [--steps 5]
    python bench/delta.py speed --gb 4 --out bench/results/delta.json [--runs 5]

density: the demo's model, trained at 3e-3 for 30 steps, is trained on at each of three learning rates, and each step is
published in bf16: the fraction of elements and bytes that change, and zstd's ratio at several levels. What it prints
does not depend on how busy the machine is.

speed: a checkpoint of which 2 % of the elements change, spread over all tensors. Publish with a copy of the version
before is compared with one read and BLAKE3 of both; apply with a read and a write of what differs, which is all shards;
and both with a full copy, `rsync --inplace` and `zstd --patch-from`, as far as they are installed. Turn by turn, on a
quiet machine, files in the page cache.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

RATES = (1e-6, 1e-5, 1e-4)
LEVELS = (1, 3, 9, 19)
SHARE = 0.02  # of the elements that change
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
    old, new = root / "old", root / "new"
    nbytes = write_checkpoint(old, llama_of(gb * 1e9 / 2, 1024, least_layers=4), num_shards=4)
    shutil.copytree(old, new)
    change(new)
    reshard("delta", "publish", old, "--chain", root / "chain")
    reshard("delta", "publish", new, "--chain", root / "chain", "--base", old)
    reshard("delta", "apply", root / "chain", "--to", root / "served", "--version", "1")
    shutil.copytree(root / "chain/weight_v000001", root / "one/weight_v000001")
    measures = {
        "publish": lambda: timed(root / "one/weight_v000002", "delta", "publish", new, "--chain", root / "one",
                                 "--base", old),
        "hash both": lambda: hashed(root, old, new),
        "apply": lambda: applied(root, 2),
        "apply back": lambda: applied(root, 1),
        "cp -r": lambda: measure.run_measured(["cp", "-r", str(new), str(root / "copy")], root / "copy"),
    }  # fmt: skip
    if shutil.which("rsync"):
        measures["rsync --inplace"] = lambda: rsynced(root, old, new)
    if shutil.which("zstd"):
        measures["zstd --patch-from"] = lambda: patched(root, old, new)
    turns = measure.take_turns(measures, num_turns)
    delta = sum(path.stat().st_size for path in (root / "chain/weight_v000002").iterdir())
    return {
        "what": f"publish and apply of {gb} GB, {SHARE:.0%} of whose elements change",
        "nbytes": nbytes,
        "delta_nbytes": delta,
        **{name: measure.summary([turn[name] for turn in turns]) for name in measures},
        "publish_of_hash_both": measure.median_ratio(
            (turn["publish"].wall_s for turn in turns), (turn["hash both"].wall_s for turn in turns)
        ),
        "apply_of_cp": measure.median_ratio(
            (turn["apply"].wall_s for turn in turns), (turn["cp -r"].wall_s for turn in turns)
        ),
    }


def change(folder: Path) -> None:
    """Flip the lowest bit of 2 % of the bf16 elements of each shard, chosen at random."""
    generator = np.random.default_rng(0)
    for shard in sorted(folder.glob("*.safetensors")):
        first = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
        data = np.memmap(shard, np.uint8, "r+", offset=first)
        elements = data[: len(data) // 2 * 2].view(np.uint16)
        for begin in range(0, len(elements), 1 << 24):
            part = elements[begin : begin + (1 << 24)]
            part ^= (generator.random(len(part), np.float32) < SHARE).astype(np.uint16)
        data.flush()


def timed(out: Path, *arguments: object) -> measure.Run:
    return measure.run_measured([*measure.RESHARD, *map(str, arguments)], out)


def hashed(root: Path, old: Path, new: Path) -> measure.Run:
    digests = [["check", str(folder), "--digests", "write"] for folder in (old, new)]
    script = "import sys, json; from reshard.cli import main\n" + "".join(
        f"sys.argv = ['reshard', *{arguments!r}]\ntry: main()\nexcept SystemExit as e: assert not e.code\n"
        for arguments in digests
    )
    run = measure.run_measured([sys.executable, "-c", script])
    for folder in (old, new):
        (folder / "digests.json").unlink()
    return run


def applied(root: Path, version: int) -> measure.Run:
    arguments = ["delta", "apply", root / "chain", "--to", root / "served", "--version", version]
    return measure.run_measured([*measure.RESHARD, *map(str, arguments)])


def rsynced(root: Path, old: Path, new: Path) -> measure.Run:
    shutil.rmtree(root / "rsync", ignore_errors=True)
    shutil.copytree(old, root / "rsync")
    return measure.run_measured(["rsync", "-r", "--inplace", "--no-whole-file", f"{new}/", f"{root / 'rsync'}/"])


def patched(root: Path, old: Path, new: Path) -> measure.Run:
    shards = [path.name for path in sorted(new.glob("*.safetensors"))]
    commands = [
        f"zstd -q -f --long=31 -1 --patch-from {old / name} {new / name} -o {root / name}.zst" for name in shards
    ]
    return measure.run_measured(["bash", "-euc", "; ".join(commands)])


def reshard(*arguments: object) -> str:
    command = [*measure.RESHARD, *map(str, arguments)]
    return subprocess.run(command, check=True, cwd=measure.ROOT, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
