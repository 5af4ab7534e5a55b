"""Train on the split that FLOPs give, and on those that `runner measure` gives, and compare the time of a step.

    python bench/balance.py [--out bench/results/balance.json] [--runs 3] [--steps 8] [--folder DIR]

Qwen3.5 35B-A3B at an eighth of its widths, experts and vocabulary, with 12 of its 40 layers, on two ranks of one thread
each: experts and, in three of four layers, Gated DeltaNet are many small operations, while the head's large products
reach the processor's best rate. Its times are measured twice: each module alone, and from the traced steps of a run on
the split by FLOPs. `reshard plan` predicts each split's step from the modules measured alone. Each turn trains on each
split for some steps, in rotating order; a step's time is the median of those after the third.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

CONFIG = {
    "vocab_size": 31040, "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_experts": 32, "num_experts_per_tok": 8,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = measure.options_of(__doc__, runs=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-balance-") as scratch:
        root = Path(scratch)
        write_model(root / "model")
        pack(root / "model", root / "flops", "balance:flops,pp=2")
        average = [measure.load_average()]
        measure.train(
            root / "flops", root / "log", options.steps, "--trace", f"{measure.WARM_STEPS + 1}-{options.steps}"
        )
        alone = root / "alone.json"
        measure.run_runner("measure", root / "flops", "--seq-len", measure.SEQ_LEN, "--out", alone, "--quiet")
        for name, times in {"alone": alone, "traced": root / "log" / "times.json"}.items():
            pack(root / "model", root / name, "balance:time,pp=2", "--cost", str(times))
        names = ("flops", "alone", "traced")
        turns = measure.take_turns(
            {name: partial(measure.step_s, root / name, options.steps) for name in names}, options.runs
        )
        average.append(measure.load_average())
        modules = {name: modules_of(root / name) for name in names}
        predicted = {name: predicted_s(root / name, root / "alone.json") for name in names}
    result = {
        "what": "seconds of a training step, split by FLOPs and by measured times",
        **measure.circumstances(),
        "load_average": average,
        "model": CONFIG,
        "seq_len": measure.SEQ_LEN,
        "global_batch": measure.GLOBAL_BATCH,
        "splits": {
            name: {"modules": modules[name], "predicted_s": predicted[name], **summary(name, turns)} for name in names
        },
    }
    measure.write_result(result, options.out)


def summary(name: str, turns: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Return the seconds of a step on a split, and the median of their ratios to those on the split by FLOPs."""
    taken = [turn[name] for turn in turns]
    return {
        "step_s": [round(each, 4) for each in taken],
        "median_s": round(statistics.median(taken), 4),
        "ratio_to_flops": measure.median_ratio(taken, (turn["flops"] for turn in turns)),
    }


def write_model(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**CONFIG)).save_pretrained(folder)


def pack(source: Path, out: Path, *layout: str) -> None:
    file = out.with_suffix(".toml")
    plan = [*measure.RESHARD, "plan", str(source), "--layout", *layout, "--seq-len", str(measure.SEQ_LEN)]
    measure.run_quietly([*plan, "--write", str(file), "--force"])
    measure.run_quietly([*measure.RESHARD, "pack", str(source), "--layout", str(file), "--out", str(out)])


def predicted_s(packed: Path, times: Path) -> float:
    """Return the seconds of a step's schedule, simulated with these times."""
    command = [*measure.RESHARD, "plan", str(packed), "--cost", str(times), "--seq-len", str(measure.SEQ_LEN), "--json"]
    command += ["--microbatches", str(measure.GLOBAL_BATCH)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return round(json.loads(said)["step_s"], 4)


def modules_of(packed: Path) -> list[int]:
    """Return how many modules each stage has."""
    return [len(stage["modules"]) for stage in json.loads((packed / "manifest.json").read_text())["stages"]]


if __name__ == "__main__":
    main()
