"""Compare the runner's step with a plain loop over torch.distributed.pipelining, on two pipeline ranks.

    python bench/step.py [--turns 9] [--schedule 1F1B] [--out bench/results/step.json]

Both train the same Llama from the same weights, in the same processes, one step each in turn, in alternating order.
The plain loop is torch's own schedule class and AdamW; the runner's step also reduces loss and gradient norm over the
ranks, checks that gradients are finite, and measures the step time breakdown. Before anything is timed, both must
reach the same weights, bit for bit. Every step computes for seconds and sends a few MB.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
NUM_RANKS, CHECKED = 2, 2  # steps after which both have the same weights
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1


def rank(turns: int, schedule: str, out: Path) -> None:
    """Run one rank: check, then time; rank 0 writes the results."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps, weights = {}, {}
    for name, build in (("runner", _runner), ("plain", _plain)):
        steps[name], weights[name] = build(schedule)
    losses = {name: [step(number) for number in range(CHECKED)] for name, step in steps.items()}
    assert len({tuple(found) for found in losses.values()}) == 1, losses
    for ours, theirs in zip(*weights.values(), strict=True):
        assert torch.equal(ours, theirs), "the two reached different weights"

    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns):
        for name in sorted(steps, reverse=turn % 2 == 1):
            dist.barrier()
            began_s = time.perf_counter()
            steps[name](CHECKED + turn)
            dist.barrier()
            found[name].append(time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def _build(schedule: str) -> tuple[Any, ...]:
    """Return this rank's stages, with weights that depend only on their names, and the objects around them."""
    import torch
    from torch import distributed as dist

    from manifests.placement import Placement
    from runner.config.schema import BatchOptions
    from runner.models import family_for
    from runner.pipeline.chunk import build_chunks, materialize, named_hf_parameters

    per_rank = 1 if schedule in ("GPipe", "1F1B") else 2
    placement = Placement(num_stages=NUM_RANKS * per_rank, num_ranks=NUM_RANKS)
    cut = BatchOptions(global_batch=8, microbatch=1, seq_len=256)
    family = family_for(CONFIG, max_seq_len=cut.seq_len)
    bounds = [round(len(family.modules) * stage / placement.num_stages) for stage in range(placement.num_stages + 1)]
    modules = tuple(tuple(family.modules[bounds[i] : bounds[i + 1]]) for i in range(placement.num_stages))
    chunks = build_chunks(family, modules, placement.stages_on(dist.get_rank()))
    for chunk in chunks:
        materialize(chunk, device=torch.device("cpu"), dtype=torch.float32)
        for fqn, parameter in named_hf_parameters(chunk):
            generator = torch.Generator().manual_seed(sum(fqn.encode()))
            if "norm" in fqn:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(std=0.02, generator=generator)
    return family, modules, placement, chunks, cut


def _batch(cut: Any, number: int) -> Any:
    import torch

    from runner.data.sequences import Batch

    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, CONFIG["vocab_size"], (cut.global_batch, cut.seq_len + 1), generator=generator)
    return Batch(tokens=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), num_tokens=tokens.numel())


def _runner(schedule: str) -> tuple[Callable[[int], float], list[Any]]:
    import torch
    from torch import distributed as dist

    from runner.config.schema import OptimOptions
    from runner.pipeline.schedule import build_schedule
    from runner.pipeline.stage_metadata import plan_stage_metadata
    from runner.pipeline.timetable import find_timetable
    from runner.profiling.trace import Clock
    from runner.training.gradient_norm import StepTotals
    from runner.training.optimizer import Optimizer
    from runner.training.step import Engine, train_step
    from runner.training.ties import lead_parameters

    family, modules, placement, chunks, cut = _build(schedule)
    parameters = lead_parameters(chunks, ())
    options = OptimOptions(lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY, max_norm=0)
    timetable = find_timetable(schedule, placement, cut.num_microbatches)
    clock = Clock(timetable.planned(cut.num_microbatches), dist.get_rank())
    engine = Engine(
        schedule=build_schedule(timetable, chunks, plan_stage_metadata(family, modules, torch.float32), cut),
        ties=(),
        totals=StepTotals(parameters, (), device=torch.device("cpu"), num_times=clock.num_times),
        optimizer=Optimizer(parameters, options),
        clock=clock,
    )

    def step(number: int) -> float:
        clock.note_data(0.0)
        loss = train_step(engine, _batch(cut, number), number).loss
        clock.split()
        return loss

    return step, [p for _, p in parameters]


def _plain(schedule: str) -> tuple[Callable[[int], float], list[Any]]:
    import torch
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    family, _, placement, chunks, cut = _build(schedule)
    tokens = torch.empty(cut.microbatch, cut.seq_len, dtype=torch.int64)
    hidden, logits = (
        torch.empty(cut.microbatch, cut.seq_len, width, requires_grad=True)
        for width in (family.hidden_size, family.vocab_size)
    )
    last = placement.num_stages - 1
    stages: list[Any] = [
        PipelineStage(
            chunk.body,
            chunk.stage,
            placement.num_stages,
            torch.device("cpu"),
            input_args=hidden if chunk.stage else tokens,
            output_args=logits if chunk.stage == last else hidden,
        )
        for chunk in chunks
    ]

    def loss_of(logits: torch.Tensor, labels: torch.Tensor, num_tokens: int) -> torch.Tensor:
        summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return summed / num_tokens

    kind = get_schedule_class(schedule)
    several: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    torch_schedule = kind(several, cut.num_microbatches, loss_fn=loss_of, scale_grads=False)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    adamw = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    total = torch.zeros(1, dtype=torch.float64)

    def step(number: int) -> float:
        adamw.zero_grad()
        batch, losses = _batch(cut, number), list[torch.Tensor]()
        args = (batch.tokens,) if dist.get_rank() == 0 else ()
        if dist.get_rank() == NUM_RANKS - 1:
            torch_schedule.step(
                *args,
                target=batch.labels,
                losses=losses,
                loss_kwargs={"num_tokens": batch.num_tokens},
                return_outputs=False,
            )
        else:
            torch_schedule.step(*args, return_outputs=False)
        adamw.step()
        total.fill_(math.fsum(loss.item() for loss in losses))
        dist.broadcast(total, src=NUM_RANKS - 1)
        return total.item()

    return step, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--schedule", default="1F1B", help="one with looped placement")
    parser.add_argument("--out")
    parser.add_argument("--rank-to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_to:
        rank(options.turns, options.schedule, Path(options.rank_to))
        return
    with tempfile.TemporaryDirectory(prefix="bench-step-") as scratch:
        out = Path(scratch, "found.json")
        arguments = ["--rank-to", str(out), "--turns", str(options.turns), "--schedule", options.schedule]
        measure.run_ranks(NUM_RANKS, __file__, *arguments)
        found = json.loads(out.read_text())
    result = {
        "what": "one optimizer step of a Llama on two ranks: the runner's, and a plain loop over torch's schedule",
        **measure.circumstances(),
        "schedule": options.schedule,
        "turns": options.turns,
        "ratio_to_plain": measure.median_ratio(found["runner"], found["plain"]),
        "step_s": {name: [round(each, 3) for each in took] for name, took in found.items()},
        "median_step_s": {name: round(statistics.median(took), 3) for name, took in found.items()},
    }
    measure.write_result(result, options.out)


if __name__ == "__main__":
    main()
