"""Time how long an asynchronous save pauses training, compared with a plain copy of the same memory.

    python bench/saving.py [--gb 1] [--turns 9] [--device cuda] [--folder DIR] [--out bench/results/saving.json]

On one rank and on two, each with this many GB of weights and AdamW state in float32; with --device cuda on one, from
a GPU into pinned host memory. In every turn the ranks start
together with no save in flight, and the order of the two alternates; the plain copy goes, tensor by tensor, into
memory that was touched before. Before anything is timed, a checkpoint must contain, bit for bit, what the ranks had
when the save was requested, although they changed it since.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

BYTES_PER_PARAMETER = 12  # in float32: weight, exp_avg, exp_avg_sq


def rank(packed: Path, turns: int, out: Path, device: str) -> None:
    """Run one rank: a first save, which is checked, then the turns; write the results."""
    import torch
    from torch import distributed as dist

    from manifests.models import module_of
    from manifests.schema import MOMENTS, WEIGHTS, DataPosition
    from runner.bundle.packed import open_packed
    from runner.checkpoint.async_save import Saver
    from runner.checkpoint.history import claim_history
    from runner.checkpoint.resume import remember
    from runner.checkpoint.save import SaveContext
    from runner.checkpoint.state import nbytes_of
    from runner.config.flags import parse_training
    from runner.tensors.local_shard import whole_pieces

    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", timeout=timeout)
    number, found = dist.get_rank(), open_packed(packed)
    history = packed.parent / "history"
    options = parse_training(["--data", "synthetic", "--checkpoint", str(history), "--keep", "1"])
    assert options.checkpoint is not None
    modules = found.stage_modules[number]
    shapes = {fqn: shape for fqn, shape in found.shape.tensors.items() if module_of(fqn, modules)}
    held = {
        number: {
            holds: whole_pieces({fqn: torch.randn(shape, device=device) for fqn, shape in shapes.items()})
            for holds in (WEIGHTS, *MOMENTS)
        }
    }
    tensors = [piece.memory for pieces in held[number].values() for piece in pieces]
    is_gpu = device == "cuda"
    rooms = [torch.zeros(tensor.shape, pin_memory=is_gpu) for tensor in tensors]
    context = SaveContext(manifest=found.manifest, root=found.root, parents=(found.read.parent,))

    def copy() -> None:
        for room, tensor in zip(rooms, tensors, strict=True):
            room.copy_(tensor, non_blocking=is_gpu)
        if is_gpu:
            torch.cuda.synchronize()

    holding = None
    if number == 0:
        holding = claim_history(history)
        holding.__enter__()
    dist.barrier()
    with Saver(context, options.checkpoint, held, timeout) as saver:

        def save(step: int) -> None:
            data = DataPosition(num_sequences=step, digest="blake3:" + 64 * "0")
            saver.save(held, remember(options, found.shape, step=step, num_tokens=step, data=data))

        def timed(what: Callable[[], None]) -> float:
            if is_gpu:
                torch.cuda.synchronize()
            dist.barrier()
            began_s = time.perf_counter()
            what()
            ended_s = time.perf_counter()
            for report in saver.reports(wait=True):
                assert report.failure is None, report.failure
            return ended_s - began_s

        def save_and_change() -> None:
            save(1)
            for tensor in tensors:
                tensor.neg_()

        copy()
        first_s = timed(lambda: save(0))  # host memory may not be allocated yet
        timed(save_and_change)
        dist.barrier()
        check(history / "step-000001", number, held[number], rooms)
        turn_s: dict[str, list[float]] = {"save": [], "copy": []}
        for turn in range(turns):
            what: dict[str, Callable[[], None]] = {"save": partial(save, 2 + turn), "copy": copy}
            for name in sorted(what, reverse=turn % 2 == 1):
                turn_s[name].append(timed(what[name]))
    if holding is not None:
        holding.__exit__(None, None, None)
    (out / f"rank{number}.json").write_text(json.dumps({"nbytes": nbytes_of(held), "first_s": first_s, **turn_s}))
    dist.barrier()
    dist.destroy_process_group()


def check(checkpoint: Path, stage: int, held: dict[Any, Any], expected: Sequence[Any]) -> None:
    """Check the result first: every saved tensor of a stage equals the copied one."""
    import torch
    from safetensors.torch import load_file

    from stores.open import open_manifest

    shards = {shard.holds: checkpoint / shard.path for shard in open_manifest(checkpoint).manifest.stages[stage].shards}
    saved = {holds: load_file(path) for holds, path in shards.items()}
    names = [(holds, piece.fqn) for holds, pieces in held.items() for piece in pieces]
    for (holds, fqn), tensor in zip(names, expected, strict=True):
        assert torch.equal(saved[holds][fqn], tensor), f"{holds} {fqn} differs from what was saved"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--width", type=int, default=1024, help="hidden size")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", help="scratch folder")
    parser.add_argument("--out")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        packed, turns, out = options.rank
        rank(Path(packed), int(turns), Path(out), options.device)
        return
    load = [measure.load_average()]
    counts = (1, 2) if options.device == "cpu" else (1,)
    runs = {f"{count} ranks": _run(count, options) for count in counts}
    result = {
        "what": "pause of the training thread for an asynchronous save of weights and AdamW state, and "
        "a plain copy of the same tensors; in turn, no save in flight; medians of ratios within a turn",
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "device": options.device,
        "turns": options.turns,
        **runs,
    }
    measure.write_result(result, options.out)


def _run(num_ranks: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """Return the results of each rank."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-saving-") as scratch:
        place = Path(scratch)
        config = llama_of(num_ranks * options.gb * 1e9 / BYTES_PER_PARAMETER, options.width, least_layers=2)
        write_checkpoint(place / "source", config, num_shards=1, dtype="F32")
        packed = str(place / "packed")
        measure.run_quietly(
            [*measure.RESHARD, "pack", str(place / "source"), "--layout", f"pp={num_ranks}", "--out", packed]
        )
        arguments = ["--device", options.device, "--rank", packed, str(options.turns), str(place)]
        measure.run_ranks(num_ranks, __file__, *arguments)
        return [_summary(json.loads((place / f"rank{i}.json").read_text())) for i in range(num_ranks)]


def _summary(found: dict[str, Any]) -> dict[str, object]:
    worst = max(save_s / copy_s for save_s, copy_s in zip(found["save"], found["copy"], strict=True))
    return {
        "nbytes": found["nbytes"],
        "first_stall_s": round(found["first_s"], 4),
        "stall_s": [round(seconds, 4) for seconds in found["save"]],
        "copy_s": [round(seconds, 4) for seconds in found["copy"]],
        "ratio": measure.median_ratio(found["save"], found["copy"]),
        "worst_ratio": round(worst, 3),
    }


if __name__ == "__main__":
    main()
