"""Time a reshard of a training checkpoint, with AdamW's optimizer state, from 8 stages to 4; write it as JSON.

    python bench/resharding.py --gb 4 --out bench/results/reshard-4gb.json [--runs 5] [--folder DIR]

Like is compared with like: a reshard that waits for the disk with `cp -r` and a flush of what it
wrote, one that leaves flushing to the kernel with a bare `cp -r`. The peer reads the same state as a checkpoint of
torch.distributed.checkpoint into one process, as plain tensors, and saves it again; it flushes nothing.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

from manifests.schema import MOMENTS, OptimizerState, ParameterGroup, Stage, TrainingState
from manifests.store import write_manifest
from stores.open import open_manifest

WIDTH = 1024
BYTES_PER_PARAMETER = 12  # in float32: weight, exp_avg, exp_avg_sq
PEERS_SCRIPT = Path(__file__).with_name("peers.py")


def main() -> None:
    options = measure.options_of(__doc__, gb=4.0).parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-reshard-") as scratch:
        root = Path(scratch)
        nbytes = write_trained(root, options.gb)
        trained, copied, resharded = root / "trained", root / "copied", root / "resharded"
        pack = [*measure.RESHARD, "pack", str(trained), "--layout", "pp=4", "--out", str(resharded), "--quiet"]
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
        load = [measure.load_average()]
        measures = {name: partial(measure.run_measured, *command) for name, command in commands.items()}
        turns = measure.take_turns(measures, options.runs)
    result = {
        "what": "reshard pack of a checkpoint with AdamW state, 8 stages to 4, digests verified; cp -r; and DCP "
        "loading and saving the state in one process; in turn, warm cache; medians of ratios within a turn",
        **measure.circumstances(),
        "nbytes": nbytes,
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        "gib_per_s": round(nbytes / 2**30 / statistics.median(turn["reshard"].wall_s for turn in turns), 2),
        "ratios": {
            "reshard to cp_and_sync": _ratio("reshard", "cp_and_sync", "wall_s", turns),
            "reshard_no_sync to cp": _ratio("reshard_no_sync", "cp", "wall_s", turns),
            "reshard to cp": _ratio("reshard", "cp", "wall_s", turns),
            "dcp to reshard": _ratio("dcp", "reshard", "wall_s", turns),
            "dcp to reshard, anonymous memory": _ratio("dcp", "reshard", "anonymous_nbytes", turns),
        },
        "commands": {name: measure.summary([turn[name] for turn in turns]) for name in commands},
    }
    measure.write_result(result, options.out)


def write_trained(root: Path, gb: float) -> int:
    """Write a training checkpoint of 8 stages, with copies of the weights as optimizer state; return its bytes."""
    source, trained = root / "source", root / "trained"
    config = llama_of(gb * 1e9 / BYTES_PER_PARAMETER, WIDTH, least_layers=8)
    write_checkpoint(source, config, num_shards=2, dtype="F32")
    measure.run_quietly([*measure.RESHARD, "pack", str(source), "--layout", "pp=8", "--out", str(trained), "--quiet"])
    shutil.rmtree(source)
    manifest = open_manifest(trained).manifest
    group = ParameterGroup(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    state = TrainingState(
        step=100, num_tokens=0, dtype="F32", optimizer=OptimizerState(name="AdamW", max_norm=1.0, groups=(group,))
    )
    stages = tuple(_with_moments(stage, trained) for stage in manifest.stages)
    write_manifest(trained, replace(manifest, stages=stages, training=state))
    return sum(path.stat().st_size for path in trained.rglob("*.safetensors"))


def check(pack: list[str], trained: Path, resharded: Path) -> None:
    """Check the result first: every tensor equals the parent's."""
    measure.run_quietly(pack)
    measure.run_quietly([*measure.RESHARD, "verify", str(resharded), "--against", str(trained), "--quiet"])
    shutil.rmtree(resharded)


def _with_moments(stage: Stage, trained: Path) -> Stage:
    (weights,) = stage.shards
    shards = [weights]
    for holds in MOMENTS:
        path = Path(holds, weights.path)
        (trained / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(trained / weights.path, trained / path)
        shards.append(replace(weights, path=path.as_posix(), holds=holds))
    return replace(stage, shards=tuple(shards))


def _ratio(name: str, other: str, field: str, turns: list[dict[str, measure.Run]]) -> float:
    """Return the ratio of two commands' times or memory."""
    value = attrgetter(field)
    return measure.median_ratio((value(turn[name]) for turn in turns), (value(turn[other]) for turn in turns))


if __name__ == "__main__":
    main()
