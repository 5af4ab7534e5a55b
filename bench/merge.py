"""Time `reshard merge` beside `cp` with a flush and peft's merge of the same adapter, and plan one of DeepSeek-V3.

    python bench/merge.py --gb 4 --out bench/results/merge-4gb.json [--runs 3] [--folder DIR]

Adapters have rank 16, on all projections of attention, or on q_proj and v_proj alone. `reshard pack` of the same base
is a merge without arithmetic. DeepSeek-V3 has its true shape, float8 blocks in sparse files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint
from deepseek import CONFIG, NUM_SHARDS
from sparse import write_sparse

from manifests.models import model_shape

WIDTH, RANK = 2048, 16
FEW = ("q_proj", "v_proj")
PREFIX = "base_model.model."


def main() -> None:
    parser = measure.options_of(__doc__, gb=4.0, runs=3)
    parser.add_argument("--child", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        merge_with_peft(*options.child)
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-merge-") as scratch:
        root = Path(scratch)
        config = llama_of(options.gb * 1e9 / 2, WIDTH, least_layers=4)
        source, adapter, few, out = (root / name for name in ("source", "adapter", "few", "out"))
        nbytes = write_checkpoint(source, config, num_shards=4)
        num_adapted, num_few = write_adapter(adapter, config), write_adapter(few, config, FEW)
        merge, merge_few = (
            [*measure.RESHARD, "merge", str(source), str(some), "--out", str(out), "--quiet"] for some in (adapter, few)
        )
        pack = [*measure.RESHARD, "pack", str(source), "--layout", "pp=4", "--out", str(out), "--quiet"]
        measure.run_quietly(merge)
        check_merged(source, adapter, out)
        copy = ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', str(source), str(root / "copied")]
        peft = [sys.executable, __file__, "--child", str(source), str(adapter), str(root / "peft")]
        commands = {
            "merge": (merge, out),
            "merge_q_v": (merge_few, out),
            "cp_and_sync": (copy, root / "copied"),
            "pack": (pack, out),
            "peft": (peft, root / "peft"),
        }
        subprocess.run(["rm", "-r", str(out)], check=True)
        load = [measure.load_average()]
        measures = {name: partial(measure.run_measured, *command) for name, command in commands.items()}
        turns = measure.take_turns(measures, options.runs)
        deepseek = plan_deepseek(root, options.runs)
    result = {
        "what": f"reshard merge of an adapter of rank {RANK} into a Llama in bf16 (on all of attention, or q_proj and "
        "v_proj), reshard pack of it, cp -r and sync, and peft's merge_and_unload with save_pretrained, in turn; warm "
        "cache; medians of ratios within a turn",
        **measure.circumstances(),
        "nbytes": nbytes,
        "num_adapted": num_adapted,
        "num_adapted_q_v": num_few,
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        "note": "the base has random bits: nearly every block has NaNs and infinities, which are rounded apart; under "
        "a load average above the number of cores, only processor time means much",
        "ratios": {
            f"{name} to {other}": {kind: _ratio(turns, name, other, kind) for kind in ("wall_s", "cpu_s")}
            for name, other in (
                ("merge", "cp_and_sync"),
                ("merge_q_v", "cp_and_sync"),
                ("merge", "pack"),
                ("peft", "merge"),
            )
        },
        "commands": {name: measure.summary([turn[name] for turn in turns]) for name in commands},
        "deepseek": deepseek,
    }
    measure.write_result(result, options.out)


def _ratio(turns: list[dict[str, measure.Run]], name: str, other: str, kind: str) -> float:
    ours, theirs = ([getattr(turn[command], kind) for turn in turns] for command in (name, other))
    return measure.median_ratio(ours, theirs)


def write_adapter(folder: Path, config: dict[str, Any], leaves: tuple[str, ...] = ("_proj",)) -> int:
    """Write an adapter of projections of attention with such names, and return how many it has."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for fqn, shape in model_shape(config).tensors.items():
        if ".self_attn." in fqn and any(leaf in fqn for leaf in leaves) and fqn.endswith(".weight") and len(shape) == 2:
            rows, columns = shape
            module = f"{PREFIX}{fqn.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns) / 100
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK) / 100
    names = {name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in tensors if "lora_A" in name}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, "target_modules": sorted(names)}))
    return len(tensors) // 2


def check_merged(source: Path, adapter: Path, out: Path) -> None:
    """Check the result first: a weight is that in float64, rounded once, where it is finite; another has its bytes."""
    import torch
    from safetensors import safe_open

    def read(folder: Path, name: str) -> torch.Tensor:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                if name in file.keys():  # noqa: SIM118
                    return file.get_tensor(name)
        raise AssertionError(name)

    module = "model.layers.1.self_attn.o_proj"
    a, b = (read(adapter, f"{PREFIX}{module}.lora_{half}.weight").double() for half in "AB")
    exact = read(source, f"{module}.weight").double() + 2 * b @ a
    merged = read(out, f"{module}.weight").double()
    nearest = exact.to(torch.bfloat16).double()
    near = (merged - exact).abs() <= (nearest - exact).abs()  # torch rounds to float32 on the way
    assert bool((near | ~exact.isfinite()).all())
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(read(source, name).view(torch.int16), read(out, name).view(torch.int16))


def merge_with_peft(source: Path, adapter: Path, out: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


def plan_deepseek(root: Path, num_turns: int) -> dict[str, Any]:
    """Return the time of planning a merge into DeepSeek-V3's shape."""
    config = json.loads(CONFIG.read_text())
    source, adapter = root / "deepseek", root / "deepseek-adapter"
    made = write_sparse(source, config, NUM_SHARDS)
    num_adapted = write_adapter(adapter, config)
    plan = [*measure.RESHARD, "pack", str(source), "--adapter", str(adapter), "--layout", "pp=32", "--out",
            str(root / "packed"), "--dry-run"]  # fmt: skip
    runs = [measure.run_measured(plan) for _ in range(num_turns)]
    return {
        "command": "reshard pack --adapter --layout pp=32 --dry-run",
        "num_tensors": made.num_tensors,
        "nbytes": made.nbytes,
        "num_adapted": num_adapted,
        **measure.summary(runs),
        "least_s": round(min(run.wall_s for run in runs), 3),
        "cpu_of_plan_without_adapter_s": round(statistics.median(_without(plan, num_turns)), 3),
    }


def _without(plan: list[str], num_turns: int) -> list[float]:
    at = plan.index("--adapter")
    return [measure.run_measured(plan[:at] + plan[at + 2 :]).cpu_s for _ in range(num_turns)]


if __name__ == "__main__":
    main()
