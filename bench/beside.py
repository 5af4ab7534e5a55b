"""Time the steps of `runner launch` while a checkpoint is saved, beside those of the same run when none is.

    python bench/beside.py [--runs 3] [--device cuda] [--steps 13] [--every 5] [--folder DIR] [--out FILE]

Two pipeline ranks of one thread each on a machine of two cores, so that training keeps the cores busy; with --device
cuda one rank on a GPU, which trains in bfloat16 with masters in float32 and saves while its step runs. A step is beside
a save if it begins after training resumed and before the checkpoint is committed; its time is that between the ends of
two steps without the pause for the copy, `stall_s`, which bench/saving.py compares with a copy. The first
steps, and those until the save after the last one, do not count.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

CONFIG = {**measure.LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
GPU_CONFIG = {**CONFIG, "num_hidden_layers": 24, "vocab_size": 32000, "max_position_embeddings": 2048}
GPU_FLAGS = ("--device", "cuda", "--dtype", "bf16", "--master-dtype", "fp32", "--seq-len", 2048, "--microbatch", 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    config: Mapping[str, Any]
    num_ranks: int
    num_steps: int
    every: int
    flags: tuple[object, ...]


CASES = {
    "cpu": Case(config=CONFIG, num_ranks=2, num_steps=13, every=5, flags=("--seq-len", 64, "--microbatch", 1)),
    "cuda": Case(config=GPU_CONFIG, num_ranks=1, num_steps=150, every=50, flags=GPU_FLAGS),
}
_WHERE = {"cpu": "two ranks and two cores", "cuda": "one rank and a GPU"}


def main() -> None:
    parser = measure.options_of(__doc__, runs=3)
    parser.add_argument("--device", choices=tuple(CASES), default="cpu")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--every", type=int, help="steps between checkpoints")
    options = parser.parse_args()
    case = CASES[options.device]
    case = replace(case, num_steps=options.steps or case.num_steps, every=options.every or case.every)
    load = [measure.load_average()]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-beside-") as scratch:
        root = Path(scratch)
        measure.write_llama(root / "model", case.config)
        layout = ["--layout", f"pp={case.num_ranks}", "--out", str(root / "packed")]
        measure.run_quietly([*measure.RESHARD, "pack", str(root / "model"), *layout])
        runs = []
        for _ in range(options.runs):
            runs.append(run(root, case))
            print(runs[-1], file=sys.stderr)
    result = {
        "what": f"steps of runner launch on {_WHERE[options.device]} while a checkpoint is saved, and when none is",
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "device": options.device,
        "turns": options.runs,
        "model": case.config,
        "ratio": round(statistics.median(row["ratio"] for row in runs), 3),
        "runs": {str(number): row for number, row in enumerate(runs, 1)},
    }
    measure.write_result(result, options.out)


def run(root: Path, case: Case) -> dict[str, Any]:
    """Train, and compare the steps of one run."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        log = Path(folder, "log")
        measure.run_runner(
            "launch", root / "packed", "--nproc-per-node", case.num_ranks, "--log-dir", log, "--",
            "--data", "synthetic", "--global-batch", measure.GLOBAL_BATCH, "--steps", case.num_steps, *case.flags,
            "--checkpoint", Path(folder, "saved"), "--checkpoint-every", case.every, "--no-self-check",
        )  # fmt: skip
        lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    saves = [line for line in lines if "save_s" in line and line["step"] < case.num_steps]
    ends_s = {line["step"]: line["time"] for line in steps}
    spans = [(ends_s[save["step"]] + save["stall_s"], save["save_s"]) for save in saves]
    beside, alone = list[float](), list[float]()
    for before, after in pairwise(steps[measure.WARM_STEPS - 1 :]):
        took_s, save = after["time"] - before["time"], _save_of(before["step"], saves)
        if save is not None:
            took_s -= save["stall_s"]
        is_beside = any(begun_s <= before["time"] + 1e-2 < begun_s + save_s for begun_s, save_s in spans)
        (beside if save is not None or is_beside else alone).append(took_s)
    return {
        "s of a step alone": round(statistics.median(alone), 3),
        "s of a step beside a save": round(statistics.median(beside), 3),
        "ratio": round(statistics.fmean(beside) / statistics.fmean(alone), 3),
        "steps beside": len(beside),
        "steps alone": len(alone),
        "saved bytes": saves[0]["save_nbytes"],
        "save s": [round(save["save_s"], 2) for save in saves],
        "each, alone": [round(took_s, 3) for took_s in alone],
        "each, beside": [round(took_s, 3) for took_s in beside],
    }


def _save_of(step: int, saves: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return next((save for save in saves if save["step"] == step), None)


if __name__ == "__main__":
    main()
