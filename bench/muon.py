"""Compare the runner's step with Muon with torch's own in one process, and count what owners of matrices have to do.

    python bench/muon.py [--runs 5] [--out bench/results/muon.json] [--folder DIR]

A small Llama on one rank, with `runner launch MANIFEST -- --optimizer muon`, and a plain loop over transformers' model
with torch.optim.Muon for the matrices of layers, AdamW for the rest, and clip_grad_norm_. Both read the same rows, and
must reach the same losses. A step's processor time is the difference of runs of many steps and of few. The optimizer's
part of a step is compared in one process, on the same weights and gradients, which must stay equal bit for bit.

The balance is that of `assign_owners` for each stage of four, whose matrices four ranks share: the operations of the
busiest rank over the mean, and the same of elements, that is, of state in memory and of what is exchanged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

FEW, MANY = 2, 8  # steps of a run
SEQ_LEN, GLOBAL_BATCH, LR, SAME = 128, 4, 1e-3, 1e-5
LLAMA = {**measure.LLAMA, "vocab_size": 2048, "num_hidden_layers": 2}
PP, SHARDS = 4, 4
TURNS = 10  # of the optimizer's step
BUSY = "more processes than cores: seconds are the machine's, and processor time includes refilled caches"
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "Llama 3.2 3B": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen3 30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A step of a run of many: its seconds, and its processor time with that of a run of few taken off; the losses."""

    step_s: float
    cpu_s: float
    losses: tuple[float, ...]


def main() -> None:
    parser = measure.options_of(__doc__, runs=5)
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        train_plainly(Path(options.plain), options.steps)
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-muon-") as scratch:
        root = Path(scratch)
        write_inputs(root)
        average = [measure.load_average()]
        turns = measure.take_turns({name: partial(run, root, name) for name in ("plain", "runner")}, options.runs)
        average.append(measure.load_average())
    for turn in turns:
        assert all(map(partial(math.isclose, rel_tol=SAME), *(ran.losses for ran in turn.values()))), turn
    taken = {
        name: {what: [getattr(turn[name], what) for turn in turns] for what in ("step_s", "cpu_s")} for name in turns[0]
    }
    result = {
        "what": "a training step of a Llama with Muon on one rank, beside a plain loop over torch.optim.Muon and AdamW",
        **measure.circumstances(),
        "turns": options.runs,
        "load_average": average,
        "model": LLAMA,
        "ratio_to_plain": measure.median_ratio(taken["runner"]["step_s"], taken["plain"]["step_s"]),
        "ratio_to_plain, processor time": measure.median_ratio(taken["runner"]["cpu_s"], taken["plain"]["cpu_s"]),
        "median": {name: {of: round(statistics.median(each), 3) for of, each in taken[name].items()} for name in taken},
        "each": {name: {of: [round(it, 3) for it in each] for of, each in taken[name].items()} for name in taken},
        **({"note": BUSY} if max(average) > (os.cpu_count() or 1) else {}),
        "optimizer step": optimizer_step(TURNS),
        f"balance of owners, pp={PP}, dp_shard={SHARDS}": {
            name: dict(balance(config)) for name, config in MODELS.items()
        },
    }
    measure.write_result(result, options.out)


def write_inputs(root: Path) -> None:
    """Write the model, and pack it, and rows of random tokens."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(root / "model")
    tokens = torch.randint(LLAMA["vocab_size"], (MANY * GLOBAL_BATCH, SEQ_LEN)).tolist()
    (root / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in tokens))
    command = (*measure.RESHARD, "pack", str(root / "model"), "--layout", "pp=1", "--out", str(root / "packed"))
    measure.run_quietly(command)


def run(root: Path, name: str) -> Ran:
    few, many = (timed(root, name, num_steps) for num_steps in (FEW, MANY))
    ends_s = [line["time"] for line in many[0]]
    steps_s = [after - before for before, after in zip(ends_s[FEW - 1 :], ends_s[FEW:], strict=False)]
    return Ran(
        step_s=statistics.median(steps_s),
        cpu_s=(many[1] - few[1]) / (MANY - FEW),
        losses=tuple(line["loss"] for line in many[0]),
    )


def timed(root: Path, name: str, num_steps: int) -> tuple[list[dict[str, float]], float]:
    """Return the lines of a run's steps, and the processor time of all of it."""
    with tempfile.TemporaryDirectory(dir=root) as log:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if name == "runner":
            measure.run_runner(
                "launch", root / "packed", "--nproc-per-node", 1, "--log-dir", log, "--", "--data", root / "rows.jsonl",
                "--tokenized", "--seq-len", SEQ_LEN, "--global-batch", GLOBAL_BATCH, "--microbatch", 1,
                "--optimizer", "muon", "--lr", LR, "--steps", num_steps, "--no-self-check",
            )  # fmt: skip
            lines = [json.loads(line) for line in Path(log, "metrics.jsonl").read_text().splitlines()]
        else:
            command = (sys.executable, __file__, "--plain", str(root), "--steps", str(num_steps))
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            lines = json.loads(done.stdout.splitlines()[-1])
        return [line for line in lines if "loss" in line], measure.cpu_s_since(before)


def train_plainly(root: Path, num_steps: int) -> None:
    import torch
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    weights = dict(model.named_parameters())
    optimizers = torch_optimizers(weights)
    rows = [json.loads(line)["input_ids"] for line in (root / "rows.jsonl").read_text().splitlines()]
    lines = []
    for step in range(num_steps):
        total = 0.0
        for row in rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]:
            tokens = torch.tensor([row])
            loss = model(tokens, labels=tokens).loss / GLOBAL_BATCH
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        lines.append({"time": time.time(), "loss": total})
    print(json.dumps(lines))


def torch_optimizers(weights: dict[str, Any]) -> list[Any]:
    import torch

    hidden = [weight for name, weight in weights.items() if ".layers." in name and weight.dim() == 2]
    others = [weight for name, weight in weights.items() if ".layers." not in name or weight.dim() == 1]
    return [
        torch.optim.Muon(hidden, lr=LR, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    ]


def optimizer_step(num_turns: int) -> dict[str, object]:
    """Return the processor time of the runner's optimizer step and of torch's, in alternating order."""
    from dataclasses import replace

    import torch

    from manifests.models import model_shape
    from runner.config.optimizers import optimizer_of
    from runner.config.schema import OptimOptions
    from runner.models import family_for
    from runner.pipeline.chunk import build_chunks, materialize, named_hf_parameters
    from runner.training.algorithms import declare_kinds
    from runner.training.optimizer import Optimizer
    from runner.training.ties import lead_parameters

    torch.set_num_threads(1)
    config = {"architectures": ["LlamaForCausalLM"], **LLAMA}
    shape, options = model_shape(config, "config.json"), OptimOptions(lr=LR, optimizer="muon")
    options = replace(options, plan=declare_kinds(optimizer_of(options, shape), shape))
    family = family_for(config, max_seq_len=SEQ_LEN)
    chunks = build_chunks(family, (tuple(family.modules),), range(1))
    materialize(chunks[0], device=torch.device("cpu"), dtype=torch.float32)
    ours = dict(named_hf_parameters(chunks[0]))
    for parameter in ours.values():
        parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(parameter.numel()))
    theirs = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in ours.items()}
    runner, plain = Optimizer(lead_parameters(chunks, ()), options, chunks), torch_optimizers(theirs)
    steps = {"runner": runner.step, "plain": lambda step: [optimizer.step() for optimizer in plain]}
    cpu_s: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(num_turns + 1):
        for name, parameter in ours.items():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(turn))
            theirs[name].grad = parameter.grad.clone()
        for name in sorted(steps, reverse=turn % 2 == 1):
            began_s = time.process_time()
            steps[name](turn)
            cpu_s[name].append(time.process_time() - began_s)
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.items())
    taken = {name: [round(each, 4) for each in every[1:]] for name, every in cpu_s.items()}
    ratio = measure.median_ratio(taken["runner"], taken["plain"])
    return {"ratio_to_plain, processor time": ratio, "turns": num_turns, "cpu_s": taken}


def balance(config: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the load of the busiest owner over the mean, of the worst stage."""
    from manifests.models import model_shape
    from manifests.optimizer_state import hidden_matrices
    from runner.training.whole_matrix import assign_owners, cost_of

    shape = model_shape(config, "config.json")
    modules = shape.by_module()
    hidden = hidden_matrices(modules, shape.tensors)
    layers = [[fqn for fqn in fqns if fqn in hidden] for fqns in modules.values() if hidden.intersection(fqns)]
    worst = {"operations": 0.0, "elements": 0.0}
    for stage in range(PP):
        part = layers[stage * len(layers) // PP : (stage + 1) * len(layers) // PP]
        matrices = {(stage, fqn): shape.tensors[fqn] for of_layer in part for fqn in of_layer}
        costs = {key: cost_of(dims, is_muon=True) for key, dims in matrices.items()}
        owners = assign_owners(costs, SHARDS)
        for what, counted in (("operations", costs), ("elements", {key: math.prod(matrices[key]) for key in costs})):
            loads = [sum(count for key, count in counted.items() if owners[key] == rank) for rank in range(SHARDS)]
            worst[what] = max(worst[what], max(loads) * SHARDS / sum(loads))
    return ((f"most {what} of a rank over the mean", round(ratio, 4)) for what, ratio in worst.items())


if __name__ == "__main__":
    main()
