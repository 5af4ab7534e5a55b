"""Train on the split that FLOPs give, and on the one that `runner measure` gives, and compare the time of a step.

    python bench/balance.py [--out bench/results/balance.json] [--runs 5] [--steps 12] [--folder DIR]

A Llama of 16 narrow layers with a wide vocabulary, in which FLOPs say least about time, on two ranks of one thread
each. Its modules are measured first; `reshard pack --layout balance:flops,pp=2` and `balance:time,pp=2 --cost` split
it. Each turn trains both for some steps, in rotating order; a step's time is the median of those after the third.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

WARM = 3
SEQ_LEN, GLOBAL_BATCH = 256, 8
CONFIG = {
    "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = measure.options_of(__doc__, runs=5)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-balance-") as scratch:
        root = Path(scratch)
        write_model(root / "model")
        reshard("pack", root / "model", "--layout", "pp=2", "--out", root / "any")
        average = [measure.load_average()]
        runner("measure", root / "any", "--seq-len", SEQ_LEN, "--out", root / "times.json", "--quiet")
        layouts = {"flops": ("balance:flops,pp=2",), "time": ("balance:time,pp=2", "--cost", root / "times.json")}
        for name, layout in layouts.items():
            reshard("pack", root / "model", "--layout", *layout, "--seq-len", SEQ_LEN, "--out", root / name)
        turns = measure.take_turns(
            {name: partial(step_s, root / name, options.steps) for name in layouts}, options.runs
        )
        average.append(measure.load_average())
        times = json.loads((root / "times.json").read_text())["modules"]
        found = {name: stages_of(root / name, times) for name in layouts}
    ratio = measure.median_ratio((turn["time"] for turn in turns), (turn["flops"] for turn in turns))
    result = {
        "what": "seconds of a training step, split by FLOPs and by measured times",
        **measure.circumstances(),
        "load_average": average,
        "model": CONFIG,
        "seq_len": SEQ_LEN,
        "global_batch": GLOBAL_BATCH,
        "layouts": {
            name: {**found[name], "step_s": [round(turn[name], 4) for turn in turns],
                   "median_s": round(statistics.median(turn[name] for turn in turns), 4)}
            for name in layouts
        },
        "ratio_to_flops": ratio,
    }  # fmt: skip
    measure.write_result(result, options.out)


def write_model(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(folder)


def reshard(*args: object) -> None:
    measure.run_quietly([*measure.RESHARD, *map(str, args)])


def runner(*args: object) -> None:
    command = [sys.executable, "-m", "runner", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def step_s(packed: Path, num_steps: int) -> float:
    """Train for some steps; return the median seconds of one."""
    with tempfile.TemporaryDirectory(dir=packed.parent) as log:
        runner(
            "launch", packed, "--nproc-per-node", 2, "--log-dir", log, "--", "--data", "synthetic",
            "--seq-len", SEQ_LEN, "--global-batch", GLOBAL_BATCH, "--microbatch", 1, "--steps", num_steps,
        )  # fmt: skip
        lines = [json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_s"] for line in lines if line.get("step", 0) > WARM and "tokens_per_s" in line]
    return SEQ_LEN * GLOBAL_BATCH / statistics.median(rates)


def stages_of(packed: Path, times: dict[str, Any]) -> dict[str, Any]:
    """Return how many modules each stage has, and its seconds as measured."""
    stages = [stage["modules"] for stage in json.loads((packed / "manifest.json").read_text())["stages"]]
    seconds = [sum(sum(times[module].values()) for module in modules) for modules in stages]
    return {"modules": [len(modules) for modules in stages], "measured_stage_s": [round(each, 5) for each in seconds]}


if __name__ == "__main__":
    main()
