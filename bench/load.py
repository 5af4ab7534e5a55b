"""Compare how the runner loads one stage of four with plain reads of its bytes and with other loaders.

    python bench/load.py [--gb 4] [--runs 5] [--states cold warm touched] [--device cuda] [--out FILE]

Each loader runs in a process of its own, which times itself after its imports; all but `cat` end with all bytes touched
in their own memory. Measured once with a warm page cache, once with a cold one, as on a node that the job is new to,
and, for some loaders, once with a warm one into memory that the process has touched before. With --device cuda they
load to a GPU: the runner through pinned memory, and the others that can. fastsafetensors, Run:ai's streamer and
accelerate are among them where they are installed: `make bench-peers`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

STAGE = 1


def cat(source: Path, packed: Path, device: str) -> int:
    """The bytes once, in order, into one small buffer, as `cat` to nowhere does."""
    shard, nbytes = _shard(packed), 0
    buffer = memoryview(bytearray(128 << 10))
    with open(shard, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            nbytes += count
    return nbytes


def read_once(source: Path, packed: Path, device: str) -> int:
    """The lower limit: the stage's shard read into one new block of memory, by the same two threads."""
    return _read(_shard(packed), hashes=False)


def read_hashed(source: Path, packed: Path, device: str) -> int:
    """The lower limit of what verifies: the same, with BLAKE3 of each block of 1 MiB by the thread that read it."""
    return _read(_shard(packed), hashes=True)


def _read(shard: Path, *, hashes: bool) -> int:
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    from blake3 import blake3

    nbytes = shard.stat().st_size
    descriptor = os.open(shard, os.O_RDONLY)

    def allocate() -> memoryview:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)

    def fill(view: memoryview) -> int:
        def read(begin: int, end: int) -> None:
            hasher = blake3()
            while begin < end:
                count = os.preadv(descriptor, [view[begin : min(end, begin + (1 << 20))]], begin)
                if hashes:
                    hasher.update(view[begin : begin + count])
                begin += count

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(read, *half) for half in ((0, nbytes // 2), (nbytes // 2, nbytes))]:
                done.result()
        return nbytes

    return _timed(allocate, fill)


def runner(source: Path, packed: Path, device: str) -> int:
    """What a rank does: build its stage on the meta device, allocate memory, load its bundle, verify digests."""
    return _load_stage(packed, device, hashes=True)


def runner_background(source: Path, packed: Path, device: str) -> int:
    """The same with --digests background, until training may start."""
    return _load_stage(packed, device, hashes=False)


def _load_stage(packed: Path, device: str, *, hashes: bool) -> int:
    import torch

    from runner.bundle.packed import open_packed
    from runner.load.load import Reading, plan_reads, read_planned
    from runner.models import family_for
    from runner.pipeline.chunk import build_chunks, hf_pieces, materialize
    from stores.bundles import Bundles
    from stores.workers import threads_for_ranks

    found, how = open_packed(packed), Reading(num_threads=threads_for_ranks(), hashes=hashes)
    family, modules = family_for(found.config, max_seq_len=512), found.stage_modules

    def build() -> Any:
        (chunk,) = build_chunks(family, modules, (STAGE,))
        materialize(chunk, device=torch.device(device), dtype=torch.bfloat16)
        return chunk

    def fill(chunk: Any) -> int:
        bundles = Bundles(found.manifest, found.root)
        return read_planned(plan_reads(hf_pieces(chunk), bundles, found.shape), how)[0].nbytes

    build_chunks(family, modules, (STAGE,))  # torchtitan is imported at the first build
    return _timed(build, fill, device)


def load_file(source: Path, packed: Path, device: str) -> int:
    """The safetensors library, with tensors copied out of the mapped file where it maps it."""
    from safetensors.torch import load_file as load

    shard = _shard(packed)
    if device != "cpu":
        return _timed(dict, lambda _: _nbytes(list(load(shard, device=device).values())), device)

    def fill(targets: dict[str, Any]) -> int:
        for name, tensor in load(shard).items():
            if name in targets:
                targets[name].copy_(tensor)
            else:
                targets[name] = tensor.clone()
        return _nbytes(list(targets.values()))

    return _timed(dict, fill)


def fastsafetensors(source: Path, packed: Path, device: str) -> int:
    """The fastsafetensors library, without GPUDirect Storage, which few file systems have."""
    from fastsafetensors import fastsafe_open

    def load(_: object) -> int:
        with fastsafe_open(str(_shard(packed)), device=device, nogds=True) as file:
            return _nbytes([file.get_tensor(name) for name in file.keys()])  # noqa: SIM118 - not a dict

    return _timed(dict, load, device)


def runai(source: Path, packed: Path, device: str) -> int:
    """Run:ai's model streamer, with tensors copied out of its buffer, which it uses again."""
    from runai_model_streamer import SafetensorsStreamer

    def load(_: object) -> int:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(_shard(packed)))
            return _nbytes([tensor.clone() for _, tensor in streamer.get_tensors()])

    return _timed(dict, load)


def accelerate(source: Path, packed: Path, device: str) -> int:
    """accelerate's loader of whole checkpoints, into a model of transformers that was built on the meta device."""
    import torch
    from accelerate import init_empty_weights, load_checkpoint_in_model
    from transformers import AutoConfig, AutoModelForCausalLM

    def load(_: object) -> int:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
        load_checkpoint_in_model(model, str(source), device_map={"": "cpu"})
        return _nbytes(list(model.parameters()))

    return _timed(dict, load)


def whole(source: Path, packed: Path, device: str) -> int:
    """What each rank does with other tools: load the whole checkpoint into memory."""
    from safetensors.torch import load_file as load

    shards = sorted(source.glob("*.safetensors"))
    return _timed(dict, lambda _: _nbytes([tensor.clone() for shard in shards for tensor in load(shard).values()]))


def _nbytes(tensors: list[Any]) -> int:
    """Sum all tensors, so that all are in memory at once."""
    return sum(tensor.nbytes for tensor in tensors)


def _shard(packed: Path) -> Path:
    """Return the only shard of the stage."""
    from stores.open import open_manifest

    (shard,) = open_manifest(packed).manifest.stages[STAGE].shards
    return packed / shard.path


LOADERS: dict[str, Callable[[Path, Path, str], int]] = {
    "cat": cat,
    "read_once": read_once,
    "read_hashed": read_hashed,
    "runner": runner,
    "runner_background": runner_background,
    "load_file": load_file,
    "whole": whole,
    "fastsafetensors": fastsafetensors,
    "runai": runai,
    "accelerate": accelerate,
}
GPU_LOADERS = ("read_once", "runner", "runner_background", "load_file", "fastsafetensors")
_PACKAGES = {"fastsafetensors": "fastsafetensors", "runai": "runai_model_streamer", "accelerate": "accelerate"}
TOUCHED = ("read_once", "read_hashed", "runner", "runner_background", "load_file")
STATES = ("cold", "warm", "touched")
_began = (0.0, 0.0)  # seconds of the clock and of processors
_is_touched = False


def _timed(allocate: Callable[[], Any], fill: Callable[[Any], int], device: str = "cpu") -> int:
    """Time both, or, into touched memory, the second one when it is called again."""
    global _began
    if device == "cuda":
        import torch

        torch.zeros(1, device=device)  # a process's first use of a GPU takes long
    memory = None
    if _is_touched:
        fill(memory := allocate())
    gc.collect()
    gc.freeze()  # as in ranks: going through all that was imported takes as long as a load
    _began = time.perf_counter(), time.process_time()
    nbytes = fill(allocate() if memory is None else memory)
    if device == "cuda":
        torch.cuda.synchronize()
    return nbytes


def _loaders(device: str) -> dict[str, Callable[[Path, Path, str], int]]:
    lacking = {name for name, package in _PACKAGES.items() if find_spec(package) is None}
    names = LOADERS if device == "cpu" else GPU_LOADERS
    return {name: LOADERS[name] for name in names if name not in lacking}


def _child(name: str, state: str, source: Path, packed: Path, device: str) -> None:
    global _began, _is_touched
    _is_touched = state == "touched"
    _began = time.perf_counter(), time.process_time()
    nbytes = LOADERS[name](source, packed, device)
    load_s, cpu_s = time.perf_counter() - _began[0], time.process_time() - _began[1]
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"load_s": load_s, "cpu_s": cpu_s, "nbytes": nbytes, "peak_mb": int(peak.split()[1]) / 1e3}))


def main() -> None:
    parser = measure.options_of(__doc__, gb=4.0)
    parser.add_argument("--width", type=int, default=2048, help="hidden size")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--states", nargs="*", choices=STATES, default=list(STATES))
    parser.add_argument("--loaders", nargs="*", choices=list(LOADERS), help="default: all that are installed")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, state, source, packed = options.child
        _child(name, state, Path(source), Path(packed), options.device)
        return
    loaders = [name for name in _loaders(options.device) if name in (options.loaders or LOADERS)]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-load-") as scratch:
        source, packed = Path(scratch, "source"), Path(scratch, "packed")
        write_checkpoint(source, llama_of(options.gb * 1e9 / 2, options.width, least_layers=4), num_shards=4)
        measure.run_quietly([*measure.RESHARD, "pack", str(source), "--layout", "pp=4", "--out", str(packed)])
        load = [measure.load_average()]
        turns = {}
        for state in options.states:
            measures = {
                name: partial(_run, name, state, source, packed, options.device)
                for name in loaders
                if state != "touched" or name in TOUCHED
            }
            turns[state] = measure.take_turns(measures, options.runs)
    result = {
        "what": "one stage of four into its own memory, all bytes touched; whole: all four; cat: to /dev/null",
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "device": options.device,
        "turns": options.runs,
        **{state: {name: _summary(name, turns[state]) for name in turns[state][0]} for state in turns},
    }
    measure.write_result(result, options.out)


def _run(name: str, state: str, source: Path, packed: Path, device: str) -> dict[str, float]:
    if state == "cold":
        for shard in [*source.glob("*.safetensors"), *packed.glob("**/*.safetensors")]:
            with open(shard, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--device", device, "--child", name, state, str(source), str(packed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _summary(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    mine = [turn[name] for turn in turns]
    ratios = {
        f"ratio_to_{peer}": measure.median_ratio(
            (run["load_s"] for run in mine), (turn[peer]["load_s"] for turn in turns)
        )
        for peer in ("cat", "read_once", "read_hashed", "load_file", "fastsafetensors")
        if peer in turns[0]
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
