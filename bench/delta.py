"""Measure deltas: how many weights change in a step of training, and publish and apply beside other ways.

    python bench/delta.py density --out bench/results/delta-density.json [--steps 5]
    python bench/delta.py speed --gb 4 --out bench/results/delta.json [--runs 5]

density: the demo's model, trained at 3e-3 for 30 steps, is trained on at each of three learning rates, and each step is
published in bf16: the fraction of elements and bytes that change, and zstd's ratio at several levels. What it prints
does not depend on how busy the machine is.

speed: a checkpoint in four shards, in three of which 2 % of the elements change. Publish, with a copy of the version
before, beside one read of both, and one read and BLAKE3 of both; likewise where the 2 % are whole tensors; apply,
whose verification of the shard that stays is left out of its time, and given apart, beside a copy of the shards that
differ, flushed; bare loops, in as many threads, of the least that both can do: one reads, hashes and compares both
states and compresses what differs, the other decompresses it, changes and hashes what it reads, and writes and flushes
that; and a full copy, `rsync --inplace` and `zstd --patch-from`, which are required, and timed once. Turn by
turn, rotated, with pauses; files are in the page cache, unless the name says cold, and every writer ends with its bytes
on disk. Of one core: seconds of its time for a GB of the shards that change.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import blake3
import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint
from measure import Found

from manifests.safetensors import read_header
from manifests.versions import LEVEL
from reshard.copy.parallelism import Parallelism
from reshard.tensors.lazy import STEP_NBYTES
from reshard.transforms.arithmetic import xor_into, xor_of
from stores.bundles import TensorAt, tensors_in
from stores.local import LocalFile

RATES = (1e-6, 1e-5, 1e-4)
LEVELS = (1, 3, 9, 19)
CHEAPER = (-1, -7, -50)
SHARE = 0.02  # of the elements that change
NUM_SHARDS, PAUSE_S = 4, 1.0
PARTS_NBYTES = 256 << 20  # of a shard
BARE_NBYTES = 64 << 20  # that a thread of the bare loop takes at a time
MEASURES = (
    "apply", "bare apply", "copy of what differs", "publish", "publish, few tensors", "read both", "bare loop",
    "BLAKE3 of both", "publish, cold", "read both, cold", "full copy",
)  # fmt: skip
HASH = "import sys, blake3\nfor path in sys.argv[1:]: blake3.blake3(max_threads=-1).update_mmap(path).digest()"
BATCH = ("--seq-len", 128, "--global-batch", 32, "--microbatch", 4)


def main() -> None:
    parser = measure.options_of(__doc__, gb=4.0)
    parser.add_argument("what", choices=["density", "speed", *BARE])
    parser.add_argument("folders", nargs="*", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=5, help="steps at each learning rate")
    parser.add_argument("--without-peers", action="store_true", help="leave out rsync and zstd")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES, help="of speed; default: all")
    parser.add_argument("--prepared", type=Path, help="a folder that has, or gets, the checkpoints of speed")
    options = parser.parse_args()
    if options.what in BARE:
        BARE[options.what](*options.folders)
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-delta-") as scratch:
        root = Path(options.prepared or scratch)
        result = (
            density(root, options.steps)
            if options.what == "density"
            else speed(root, options.gb, options.runs, options.measures, with_peers=not options.without_peers)
        )
    measure.write_result({**result, **measure.circumstances()}, options.out)


def density(root: Path, num_steps: int) -> dict[str, object]:
    """Train at each rate, and compare the weights of consecutive steps in bf16."""
    subprocess.run([sys.executable, measure.ROOT / "demo/make_model.py", root], check=True, stdout=subprocess.DEVNULL)
    reshard("pack", root / "model", "--layout", "pp=2", "--out", root / "pp2")
    train(root, "pp2", "--steps", 30, "--lr", 3e-3, "--warmup-steps", 5, "--save", root / "trained")
    rows = {}
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
        rows[f"lr {rate:.0e}".replace("e-0", "e-")] = {
            "elements_changed": round(float(np.count_nonzero(difference)) / len(difference), 5),
            "bytes_changed": round(float(np.count_nonzero(difference.view(np.uint8))) / len(raw), 5),
            "delta_nbytes": published[-1]["nbytes"],
            "state_nbytes": len(raw),
            **{
                f"zstd_{level}_of_state": round(len(zstandard.ZstdCompressor(level=level).compress(raw)) / len(raw), 5)
                for level in LEVELS
            },
        }
    what = "bf16 weights of the demo's model between the last two steps of a new AdamW, after 30 at 3e-3"
    return {"what": what, "by_learning_rate": rows}


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


def speed(root: Path, gb: float, num_turns: int, only: Sequence[str], *, with_peers: bool) -> dict[str, object]:
    old, new, few, chain, before = (root / name for name in ("old", "new", "few", "chain", "before"))
    copy, served, of_few = root / "copy", root / "served", root / "chain-of-few"
    if not (root / "ready").exists():
        write_checkpoint(old, llama_of(gb * 1e9 / 2, 1024, least_layers=4), num_shards=NUM_SHARDS)
        shutil.copytree(old, new)
        differing = [change(shard) for shard in sorted(new.glob("*.safetensors"))[:-1]]
        shutil.copytree(old, few, copy_function=os.link)
        change_few(few)
        shutil.copytree(old, before, copy_function=os.link)  # which apply never writes to
        delta(root, "publish", old, "--chain", chain)
        shutil.copytree(chain, of_few, copy_function=os.link)
        delta(root, "publish", new, "--chain", chain, "--base", old, "--quiet")
        done = json.loads(reshard("delta", "apply", chain, "--to", before, "--json"))
        assert done["write_nbytes"] < 1.001 * sum(path.stat().st_size for path in differing), "only what differs"
        assert same_weights(before, new)
        delta(root, "apply", chain, "--to", before, "--version", 1)
        bare_apply(before, chain / "weight_v000002", copy)
        assert all(map(np.array_equal, map(data_of, sorted(copy.iterdir())), map(data_of, differing)))
        shutil.rmtree(copy)
        os.sync()
        (root / "ready").touch()
    shards = sorted(new.glob("*.safetensors"))
    differing, of_old, both = shards[:-1], sorted(old.glob("*.safetensors")), [*old.glob("*.safetensors"), *shards]
    verified_s = list[float]()

    def read_both() -> measure.Run:
        return shell(None, f"cat {words(both)} > /dev/null")

    def warm(run: Callable[..., measure.Run], *arguments: object) -> measure.Run:
        read_both()
        return run(*arguments)

    def applying(run: Callable[..., measure.Run], *arguments: object) -> measure.Run:
        shell(None, f"cat {before}/*.safetensors {chain}/weight_v000002/* > /dev/null")
        return run(*arguments)

    def cold(run: Callable[..., measure.Run], *arguments: object) -> measure.Run:
        for path in both:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return run(*arguments)

    def publish(source: Path, to: Path) -> measure.Run:
        shutil.rmtree(to / "weight_v000002", ignore_errors=True)
        return delta(root, "publish", source, "--chain", to, "--base", old, "--quiet")

    def apply() -> measure.Run:
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(before, served, copy_function=os.link)
        run = applying(delta, root, "apply", chain, "--to", served, "--json")
        verified_s.append(json.loads((root / "printed").read_text())["verify_s"])
        shutil.rmtree(served)
        os.sync()  # the next run must not wait for the blocks that are freed
        return replace(run, wall_s=run.wall_s - verified_s[-1])

    def bare(name: str, *folders: Path) -> measure.Run:
        return measure.run_measured([sys.executable, __file__, name, *map(str, (*folders, copy))], copy)

    measures = {
        "apply": apply,
        "bare apply": lambda: applying(bare, "bare-apply", before, chain / "weight_v000002"),
        "copy of what differs": lambda: applying(
            shell, copy, f"mkdir {copy}; cp {before}/*.v*.safetensors {copy}; sync -f {copy}"
        ),
        "publish": lambda: warm(publish, new, chain),
        "publish, few tensors": lambda: warm(publish, few, of_few),
        "read both": lambda: warm(read_both),
        "bare loop": lambda: warm(bare, "bare-publish", old, new),
        "BLAKE3 of both": lambda: warm(measure.run_measured, [sys.executable, "-c", HASH, *map(str, both)]),
        "publish, cold": lambda: cold(publish, new, chain),
        "read both, cold": lambda: cold(read_both),
        "full copy": lambda: shell(copy, f"cp -r {new} {copy}; sync -f {copy}"),
    }
    peers = {
        "publish": measures["publish"],
        "apply": measures["apply"],
        "rsync --inplace": lambda: rsynced(root, old, new),
        "zstd --patch-from": lambda: shell(
            copy,
            f"mkdir {copy}\n"
            + "\n".join(f"zstd -q -1 --long=31 --patch-from {a} {b} -o {copy / b.name}.zst"
                        for a, b in zip(of_old, shards, strict=True)),
        ),
    }  # fmt: skip
    measures = {name: measures[name] for name in MEASURES if name in only}
    loads = [measure.load_average()]
    turns = measure.take_turns(measures, num_turns, pause_s=PAUSE_S, num_warmup=0)
    beside_peers = measure.take_turns(peers, int(with_peers), pause_s=PAUSE_S, num_warmup=0)
    loads.append(measure.load_average())
    runs = dict[str, list[measure.Run]]()
    for turn in (*turns, *beside_peers):
        for name, run in turn.items():
            runs.setdefault(name, []).append(run)

    def ratios(ours: str, theirs: str) -> dict[str, float] | None:
        pairs = [(turn[ours], turn[theirs]) for turn in (*turns, *beside_peers) if ours in turn and theirs in turn]
        if not pairs:
            return None
        wall = measure.median_ratio((a.wall_s for a, _ in pairs), (b.wall_s for _, b in pairs))
        return {"wall": wall, "cpu": measure.median_ratio((a.cpu_s for a, _ in pairs), (b.cpu_s for _, b in pairs))}

    return {
        "what": f"a delta of {gb} GB in {NUM_SHARDS} shards; in all but one, {SHARE:.0%} of the elements change; "
        f"few tensors: {SHARE:.0%} of the bytes, in whole tensors",
        "turns": num_turns,
        "nbytes": sum(path.stat().st_size for path in shards),
        "delta_nbytes": sum(path.stat().st_size for path in (chain / "weight_v000002").iterdir()),
        "differing_nbytes": sum(path.stat().st_size for path in differing),
        **({"apply_verify_of_the_rest_s": round(statistics.median(verified_s), 3)} if verified_s else {}),
        "ratios": {
            f"{ours} to {theirs}": ratio
            for ours, theirs in [
                ("publish, cold", "read both, cold"),
                ("publish", "BLAKE3 of both"),
                ("bare loop", "BLAKE3 of both"),
                ("publish", "bare loop"),
                ("publish, few tensors", "BLAKE3 of both"),
                ("apply", "bare apply"),
                ("apply", "copy of what differs"),
                ("bare apply", "copy of what differs"),
                ("apply", "full copy"),
                ("apply", "rsync --inplace"),
                ("publish", "zstd --patch-from"),
            ]
            if (ratio := ratios(ours, theirs))
        },
        "of_one_core": parts(of_old[0], shards[0]),
        "commands": {name: measure.summary(of_name) for name, of_name in runs.items()},
        "load_average": loads,
    }  # fmt: skip


def bare_publish(old: Path, new: Path, out: Path) -> None:
    """Read, hash and compare both states, and compress what differs, in a thread for each core, with no checks."""

    def work(part: tuple[Path, int]) -> None:
        shard, begin = part
        hashers, frame = (blake3.blake3(), blake3.blake3()), None
        before, after, difference = (np.empty(STEP_NBYTES, np.uint8) for _ in range(3))
        with (
            open(old / shard.name, "rb", 0) as left,
            open(shard, "rb", 0) as right,
            open(out / f"{shard.name}-{begin}", "wb") as file,
        ):
            left.seek(begin)
            right.seek(begin)
            for _ in range(BARE_NBYTES // STEP_NBYTES):
                nbytes = left.readinto(before.data) and right.readinto(after.data)
                blocks = [memoryview(block)[:nbytes] for block in (before, after, difference)]
                if xor_of(*blocks) and frame is None:
                    frame = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compressobj()
                hashers[0].update(blocks[0])
                if frame is not None:
                    hashers[1].update(blocks[1])
                    file.write(frame.compress(blocks[2]))
            if frame is not None:
                file.write(frame.flush())

    out.mkdir()
    shards = sorted(new.glob("*.safetensors"))
    parts = [(shard, begin) for shard in shards for begin in range(0, shard.stat().st_size, BARE_NBYTES)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(work, parts))


def bare_apply(before: Path, delta: Path, out: Path) -> None:
    """Read, decompress, change, hash, write and flush what differs, in as many threads as apply, with no checks."""
    frames = {frame.name: frame for path in delta.glob("*.safetensors") for frame in tensors_of(path)}

    def work(tensor: TensorAt) -> None:
        frame, hasher = frames[tensor.name], blake3.blake3()
        block, difference = (memoryview(bytearray(min(STEP_NBYTES, tensor.nbytes))) for _ in range(2))
        with (
            open(str(tensor.file), "rb", 0) as left,
            open(str(frame.file), "rb") as compressed,
            open(out / Path(str(tensor.file)).name, "r+b", 0) as file,
        ):
            left.seek(tensor.begin)
            file.seek(tensor.begin)
            compressed.seek(frame.begin)
            reader = zstandard.ZstdDecompressor().stream_reader(compressed, read_size=STEP_NBYTES)
            for begin in range(0, tensor.nbytes, STEP_NBYTES):
                nbytes = left.readinto(block[: tensor.nbytes - begin])
                part = difference[:nbytes]
                while part:
                    part = part[reader.readinto(part) :]
                xor_into(block[:nbytes], difference[:nbytes])
                hasher.update(block[:nbytes])
                file.write(block[:nbytes])
            hasher.digest()

    out.mkdir()
    shards = {path: tensors_of(path) for path in sorted(before.glob("*.safetensors"))}
    differing = {path: tensors for path, tensors in shards.items() if tensors[0].name in frames}
    for path in differing:
        with open(path, "rb") as header, open(out / path.name, "wb") as file:
            file.write(header.read(header_nbytes(path)))
            file.truncate(path.stat().st_size)
    with ThreadPoolExecutor(Parallelism().computing().most_threads) as pool:
        list(pool.map(work, itertools.chain(*differing.values())))
    os.sync()


BARE = {"bare-publish": bare_publish, "bare-apply": bare_apply}


def tensors_of(path: Path) -> list[TensorAt]:
    return tensors_in(LocalFile(path), read_header(path))


def data_of(shard: Path) -> np.ndarray:
    return np.memmap(shard, np.uint8, "r", offset=header_nbytes(shard))


def parts(old: Path, new: Path) -> dict[str, float]:
    """Return what one core takes for each part of publish and apply, in seconds for a GB of weights."""
    blocks = [(before, after) for before, after in zip(blocks_of(old), blocks_of(new), strict=True)]
    nbytes, times = sum(len(after) for _, after in blocks), dict[str, float]()

    def timed(name: str, work: Callable[[], Found]) -> Found:
        began_s = time.process_time()
        result = work()
        times[name] = round((time.process_time() - began_s) / nbytes * 1e9, 3)
        return result

    def compress(level: int = LEVEL) -> bytes:
        frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compressobj(size=nbytes)
        return b"".join([*map(frame.compress, differences), frame.flush()])

    def decompress() -> None:
        reader, buffer = zstandard.ZstdDecompressor().stream_reader(frame), bytearray(len(blocks[0][0]))
        while reader.readinto(buffer):
            pass

    differences = [memoryview(bytearray(len(after))) for _, after in blocks]
    timed("BLAKE3", lambda: functools.reduce(lambda hasher, block: hasher.update(block[1]), blocks, blake3.blake3()))
    timed("compare", lambda: [xor_of(*block, differences[0][: len(block[0])]) for block in blocks])
    for block, difference in zip(blocks, differences, strict=True):
        xor_of(*block, difference)
    frame = timed("zstd", compress)
    timed("zstd, decompressed", decompress)
    for level in CHEAPER:
        cheaper = timed(f"zstd {level}", functools.partial(compress, level))
        times[f"nbytes of zstd {level}, to {LEVEL}"] = round(len(cheaper) / len(frame), 2)
    return times


def blocks_of(shard: Path) -> list[memoryview]:
    data = memoryview(np.fromfile(shard, np.uint8, PARTS_NBYTES)).cast("B")
    return [data[begin : begin + STEP_NBYTES] for begin in range(0, len(data), STEP_NBYTES)]


def change(shard: Path) -> Path:
    """Flip the lowest bit of 2 % of a shard's bf16 elements, at random."""
    data, generator = np.memmap(shard, np.uint8, "r+", offset=header_nbytes(shard)), np.random.default_rng(0)
    elements = data[: len(data) // 2 * 2].view(np.uint16)
    for begin in range(0, len(elements), 1 << 24):
        part = elements[begin : begin + (1 << 24)]
        part ^= (generator.random(len(part), np.float32) < SHARE).astype(np.uint16)
    data.flush()
    return shard


def change_few(folder: Path) -> None:
    """Change the first 2 % of a folder's bytes: all of some tensors in the first shard."""
    shard = min(folder.glob("*.safetensors"))
    nbytes = int(SHARE * sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    shutil.copy(shard, folder / "changed")
    os.replace(folder / "changed", shard)
    data = np.memmap(shard, np.uint8, "r+", offset=header_nbytes(shard))
    data[:nbytes] ^= 1
    data.flush()


def header_nbytes(shard: Path) -> int:
    with open(shard, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


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
    os.sync()
    command = f"rsync -rI --inplace --no-whole-file {new}/ {root}/rsync/; sync -f {root}/rsync"
    return shell(root / "rsync", command)


def reshard(*arguments: object) -> str:
    command = [*measure.RESHARD, *map(str, arguments)]
    return subprocess.run(command, check=True, cwd=measure.ROOT, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
