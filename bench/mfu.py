"""Compare the runner's step of a Llama on one device with the same step written in plain PyTorch, and give their MFU.

    python bench/mfu.py [--device cuda] [--turns 9] [--out bench/results/mfu.json]

Both train the same modules from the same weights in bfloat16, with master weights and AdamW in float32 (--device cuda:
1.2 billion parameters, Llama 3.2's shape, and fused AdamW), one step each in turn, in alternating order. The plain step
is a loop over microbatches, `cross_entropy`, `clip_grad_norm_` and `torch.optim.AdamW`. Before anything is timed, both
must give the same losses, to the rounding of bfloat16. MFU is of the matrix products of a forward and backward pass, at
the peak FLOP/s of the GPU's data sheet. On a GPU, torch.profiler then sees one more step of each: how long no kernel
ran between its first and its last. Last, `runner launch` trains the same model as its users start it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
import torch
from safetensors.torch import save_file

from manifests.models import model_shape
from manifests.placement import Placement
from runner.config.schema import BatchOptions, OptimOptions
from runner.data.sequences import Batch
from runner.metrics.gauges import peak_flops
from runner.models import family_for
from runner.pipeline.chunk import StageChunk, build_chunks, materialize, named_hf_parameters
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.profiling.trace import Clock
from runner.training.gradient_norm import StepTotals
from runner.training.mixed_precision import keep_masters, master_of, round_masters
from runner.training.optimizer import Optimizer
from runner.training.step import Engine, train_step
from runner.training.ties import lead_parameters

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {**LARGE, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
SIZES = {
    "cuda": (LARGE, BatchOptions(global_batch=8, microbatch=2, seq_len=2048)),
    "cpu": (SMALL, BatchOptions(global_batch=4, microbatch=2, seq_len=32)),
}
OPTIONS = OptimOptions(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_norm=1.0)
CHECKED = 3  # steps after which both have the same losses
NUM_WARM = 4  # steps of a launch that are not timed
TOLERANCE = 2e-2


def runner_step(config: dict[str, Any], cut: BatchOptions, device: torch.device) -> Callable[[int], float]:
    """Return the runner's step on one rank with one stage."""
    chunk = filled(config, cut, device)
    keep_masters([chunk], torch.float32)
    for parameter in chunk.parameters():
        master_of(parameter).copy_(parameter.detach())
    round_masters(chunk.parameters())
    parameters = lead_parameters([chunk], ())
    placement = Placement(num_stages=1, num_ranks=1)
    metadata = plan_stage_metadata(chunk.family, (chunk.family.modules,), torch.bfloat16)
    timetable = find_timetable("1F1B", placement, cut.num_microbatches)
    clock = Clock(timetable.planned(cut.num_microbatches), 0, is_cuda=device.type == "cuda")
    engine = Engine(
        schedule=build_schedule(timetable, [chunk], metadata, cut),
        ties=(),
        totals=StepTotals(parameters, (), device=device, num_times=clock.num_times),
        optimizer=Optimizer(parameters, OPTIONS),
        clock=clock,
    )
    return lambda number: train_step(engine, batch_of(config, cut, number), number).loss


def plain_step(config: dict[str, Any], cut: BatchOptions, device: torch.device) -> Callable[[int], float]:
    """Return the same step as a plain loop."""
    chunk = filled(config, cut, device)
    model, weights = chunk.body, list(chunk.parameters())
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    adamw = torch.optim.AdamW(
        masters, lr=OPTIONS.lr, betas=(OPTIONS.beta1, OPTIONS.beta2), eps=OPTIONS.eps,
        weight_decay=OPTIONS.weight_decay, fused=device.type == "cuda",
    )  # fmt: skip
    for weight in weights:
        weight.grad_dtype = torch.float32

    def step(number: int) -> float:
        batch, losses = batch_of(config, cut, number), []
        tokens, labels = (tensor.to(device).split(cut.microbatch) for tensor in (batch.tokens, batch.labels))
        for part, expected in zip(tokens, labels, strict=True):
            logits = model(part).flatten(0, 1).float()
            summed = torch.nn.functional.cross_entropy(logits, expected.flatten(), reduction="sum")
            loss = summed / batch.num_tokens
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad, None
        torch.nn.utils.clip_grad_norm_(masters, OPTIONS.max_norm)
        adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return float(torch.stack(losses).sum())

    return step


def filled(config: dict[str, Any], cut: BatchOptions, device: torch.device) -> StageChunk:
    """Return the whole model in bfloat16, with weights that depend only on their names."""
    family = family_for(config, max_seq_len=cut.seq_len)
    (chunk,) = build_chunks(family, (family.modules,), (0,))
    materialize(chunk, device=device, dtype=torch.bfloat16)
    for fqn, parameter in named_hf_parameters(chunk):
        generator = torch.Generator(device).manual_seed(sum(fqn.encode()))
        if "norm" in fqn:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02, generator=generator)
    return chunk


def batch_of(config: dict[str, Any], cut: BatchOptions, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, config["vocab_size"], (cut.global_batch, cut.seq_len + 1), generator=generator)
    labels = tokens[:, 1:].contiguous()
    return Batch(tokens=tokens[:, :-1].contiguous(), labels=labels, num_tokens=labels.numel())


def gaps_of(step: Callable[[int], float], number: int) -> dict[str, float]:
    """Return how long no kernel ran, from the first to the last of a step, and the longest time between two."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(number)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    begin_us, end_us, gaps_us = spans[0][0], spans[0][1], [0.0]
    for start, end in spans:
        gaps_us.append(max(0.0, start - end_us))
        end_us = max(end_us, end)
    return {
        "kernels": len(spans),
        "idle_share": round(sum(gaps_us) / (end_us - begin_us), 4),
        "longest_gap_us": round(max(gaps_us), 1),
        "gaps_above_20_us": sum(gap > 20 for gap in gaps_us),
    }


def launched_step_s(model: Path, cut: BatchOptions, device: str, num_steps: int) -> float:
    """Return the median seconds of a step of `runner launch`, with its defaults otherwise."""
    packed, log = model.with_name("packed"), model.with_name("log")
    measure.run_quietly([*measure.RESHARD, "pack", str(model), "--layout", "pp=1", "--out", str(packed)])
    measure.run_runner(
        "launch", packed, "--log-dir", log, "--", "--data", "synthetic", "--device", device, "--dtype", "bf16",
        "--master-dtype", "fp32", "--seq-len", cut.seq_len, "--global-batch", cut.global_batch, "--microbatch",
        cut.microbatch, "--steps", NUM_WARM + num_steps,
    )  # fmt: skip
    lines: Iterable[Any] = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    ends_s = [line["time"] for line in lines if "loss" in line][NUM_WARM - 1 :]
    return statistics.median(after - before for before, after in pairwise(ends_s))


def write_model(folder: Path, config: dict[str, Any], chunk: StageChunk) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", **config}))
    tensors = {fqn: parameter.detach().cpu() for fqn, parameter in named_hf_parameters(chunk)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device(options.device)
    config, cut = SIZES[options.device]
    steps = {"runner": runner_step(config, cut, device), "plain": plain_step(config, cut, device)}
    losses = {name: [step(number) for number in range(CHECKED)] for name, step in steps.items()}
    for ours, theirs in zip(*losses.values(), strict=True):
        assert abs(ours - theirs) <= TOLERANCE * theirs, losses
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.turns):
        for name in sorted(steps, reverse=turn % 2 == 1):
            began_s = time.perf_counter()
            steps[name](CHECKED + turn)  # returns the loss, and so has waited for the GPU
            if options.device == "cuda":
                torch.cuda.synchronize()
            found[name].append(time.perf_counter() - began_s)
    gaps = None
    if options.device == "cuda":
        gaps = {name: gaps_of(step, CHECKED + options.turns) for name, step in steps.items()}
    steps.clear()
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"), config, filled(config, cut, device))
        if options.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        launched_s = launched_step_s(Path(folder, "model"), cut, options.device, options.turns)
    medians = {name: statistics.median(took) for name, took in found.items()} | {"launch": launched_s}
    shape = model_shape(config)
    flops = shape.train_flops(cut.seq_len) * cut.global_batch * cut.seq_len
    peak = peak_flops(torch.cuda.get_device_name()) if options.device == "cuda" else None
    result = {
        "what": "one step of a Llama on one device: the runner's, and the same in plain PyTorch",
        **measure.circumstances(),
        "device": options.device,
        "parameters": sum(map(shape.count_params, shape.tensors)),
        "tokens_per_step": cut.global_batch * cut.seq_len,
        "losses": losses,
        "turns": options.turns,
        "ratio_to_plain": measure.median_ratio(found["runner"], found["plain"]),
        "launch_to_plain": round(launched_s / medians["plain"], 3),
        "gaps": gaps,
        "median_step_s": {name: round(median, 5) for name, median in medians.items()},
        "tflops_per_s": {name: round(flops / median / 1e12, 3) for name, median in medians.items()},
        "mfu": {name: round(flops / median / peak, 4) for name, median in medians.items()} if peak else None,
    }
    measure.write_result(result, options.out)


if __name__ == "__main__":
    main()
