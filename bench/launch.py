"""Time `runner launch` until the first loss is known, beside a bare script under torchrun that does the same.

    python bench/launch.py [--runs 5] [--folder DIR] [--out bench/results/launch.json]

The script is what a user of torch would write: on each of two ranks it builds transformers' Llama on the meta device,
reads its own layers from the Hugging Face file by safetensors, and takes a step by torch's schedule and AdamW. The
runner launches from the packed folder, without and with its self-check. They rotate; nothing counts unless all have the
same first loss. Seconds are those from the start of the command, and processor time is that of its whole run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

SEQ_LEN, NUM_MICROBATCHES, SAME = 64, 8, 1e-4


def main() -> None:
    parser = measure.options_of(__doc__, runs=5)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(Path(options.rank[0]), Path(options.rank[1]))
        return
    load = [measure.load_average()]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-launch-") as scratch:
        root = Path(scratch)
        measure.write_llama(root / "model")
        measure.run_quietly(
            [*measure.RESHARD, "pack", str(root / "model"), "--layout", "pp=2", "--out", str(root / "packed")]
        )
        write_tokens(root)
        ways = {
            "bare script": partial(bare, root),
            "runner, no self-check": partial(runner, root, "--no-self-check"),
            "runner": partial(runner, root),
        }
        turns = measure.take_turns(ways, options.runs)
    for turn in turns:
        losses = [ran["loss"] for ran in turn.values()]
        assert all(math.isclose(loss, losses[0], rel_tol=SAME) for loss in losses), turn
    result = {
        "what": "seconds from the start of a command until the loss of its first step is known, on two ranks, and "
        "processor time of the run: runner launch, and a script under torchrun over transformers' modules",
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "turns": options.runs,
        "model": measure.LLAMA,
        "commands": {name: _summary(name, turns) for name in ways},
    }
    measure.write_result(result, options.out)


def _summary(name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    row = {}
    for what in ("first_loss_s", "cpu_s"):
        ours, theirs = ([turn[way][what] for turn in turns] for way in (name, "bare script"))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        row[what] = round(statistics.median(ours), 3)
        row[f"{what}, ratio to bare script"] = round(statistics.median(ratios), 3)
        row[f"{what}, lowest"], row[f"{what}, highest"] = round(min(ratios), 3), round(max(ratios), 3)
    return row


def write_tokens(root: Path) -> None:
    """Write the batch of the runner's first step."""
    import torch

    from runner.config.schema import BatchOptions, DataOptions
    from runner.data.sequences import read_batches

    batch = BatchOptions(seq_len=SEQ_LEN, global_batch=NUM_MICROBATCHES, microbatch=1)
    data = DataOptions(sources=("synthetic",))
    first = next(read_batches(data, batch, folder=root, vocab_size=measure.LLAMA["vocab_size"]))
    torch.save((first.tokens, first.labels), root / "tokens.pt")


def runner(root: Path, *flags: str) -> dict[str, float]:
    began_s, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(dir=root) as log:
        measure.run_runner(
            "launch", root / "packed", "--nproc-per-node", 2, "--log-dir", log, "--", "--data", "synthetic",
            "--seq-len", SEQ_LEN, "--global-batch", NUM_MICROBATCHES, "--microbatch", 1, "--steps", 1, *flags,
        )  # fmt: skip
        lines = [json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]
    return _ran(began_s, before, next(line for line in lines if "loss" in line))


def bare(root: Path) -> dict[str, float]:
    began_s, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    measure.run_ranks(2, __file__, "--rank", str(root), str(root / "bare.json"))
    return _ran(began_s, before, json.loads((root / "bare.json").read_text()))


def _ran(began_s: float, before: resource.struct_rusage, line: Mapping[str, float]) -> dict[str, float]:
    return {"first_loss_s": line["time"] - began_s, "cpu_s": measure.cpu_s_since(before), "loss": line["loss"]}


def rank(root: Path, out: Path) -> None:
    """Run one rank of the bare script."""
    import torch
    import transformers
    from safetensors import safe_open
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number = dist.get_rank()
    config = transformers.AutoConfig.from_pretrained(root / "model")
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    half = config.num_hidden_layers // 2

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = range(half) if number == 0 else range(half, config.num_hidden_layers)
            self.names = {str(i): f"model.layers.{layer}" for i, layer in enumerate(first)}
            self.layers = torch.nn.ModuleList(model.model.layers[layer] for layer in first)
            self.ends = torch.nn.ModuleDict()
            if number == 0:
                self.ends["embed"] = model.model.embed_tokens
            else:
                self.ends["norm"], self.ends["head"] = model.model.norm, model.lm_head

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if number == 0:
                hidden = self.ends["embed"](hidden)
            places = torch.arange(hidden.shape[1]).unsqueeze(0)
            angles = rotary(hidden, places)
            for layer in self.layers:
                out = layer(hidden, position_ids=places, position_embeddings=angles)
                hidden = out[0] if isinstance(out, tuple) else out
            return self.ends["head"](self.ends["norm"](hidden)) if number == 1 else hidden

    part = Part().to_empty(device="cpu")
    rotary = LlamaRotaryEmbedding(config)
    fqns = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    with safe_open(root / "model" / "model.safetensors", "pt") as file:
        for name, parameter in part.named_parameters():
            kind, index, rest = name.split(".", 2)
            fqn = f"{part.names[index]}.{rest}" if kind == "layers" else f"{fqns[index]}.{rest}"
            parameter.data.copy_(file.get_tensor(fqn))
    tokens, labels = torch.load(root / "tokens.pt")
    hidden = torch.empty(1, SEQ_LEN, config.hidden_size, requires_grad=True)
    stage = PipelineStage(
        part, number, 2, torch.device("cpu"), input_args=hidden if number else tokens[:1],
        output_args=torch.empty(1, SEQ_LEN, config.vocab_size, requires_grad=True) if number else hidden,
    )  # fmt: skip

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
    adamw = torch.optim.AdamW(part.parameters(), lr=1e-4)
    losses: list[Any] = []
    if number == 0:
        schedule.step(tokens, return_outputs=False)
    else:
        schedule.step(target=labels, losses=losses, return_outputs=False)
    gradients = [parameter.grad for parameter in part.parameters()]
    square = get_total_norm([gradient for gradient in gradients if gradient is not None]).square()
    dist.all_reduce(square)
    clip_grads_with_norm_(part.parameters(), 1.0, square.sqrt())
    adamw.step()
    total = torch.stack(losses).mean().reshape(1) if losses else torch.zeros(1)
    dist.all_reduce(total)
    if number == 0:
        out.write_text(json.dumps({"loss": total.item(), "time": time.time()}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # at the end of an interpreter, threads of gloo abort it at times


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
