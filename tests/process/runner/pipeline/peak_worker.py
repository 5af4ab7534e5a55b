"""A rank that runs a schedule with different numbers of microbatches, and writes the most bytes that torch allocated.

usage: peak_worker.py CASES OUT

CASES is a JSON list of {"name": …, "schedule": …, "num_microbatches": …, "recompute": …, "shares": …}; `shares` are the
numbers of modules on each stage. What is counted is what torch's profiler reports of its allocator in one step, and in
one evaluation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

from manifests.models import model_shape
from manifests.models.memory import estimate_memory
from manifests.models.training import POLICIES, Training
from manifests.placement import Placement
from runner.config.schema import BatchOptions, ComputeOptions
from runner.data.sequences import Batch
from runner.models import family_for
from runner.pipeline.chunk import build_chunks, materialize
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.training.activation_checkpoint import apply_compute_options
from tests.fast.runner.tiny import CPU, padded_batch
from tests.process.runner.pipeline.parity_cases import cut_modules

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
SEQ_LEN = 256
_NUM_STEPS = 3  # now and then the profiler misses allocations of one


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    is_v = case["schedule"] in ("ZBVZeroBubble", "DualPipeV")
    num_ranks, shares = dist.get_world_size(), case["shares"]
    placement = Placement(num_stages=len(shares), num_ranks=num_ranks, style="v" if is_v else "loop")
    cut = BatchOptions(global_batch=case["num_microbatches"], microbatch=1, seq_len=SEQ_LEN)
    family = family_for(CONFIG, max_seq_len=SEQ_LEN)
    stage_modules = cut_modules(family.modules, tuple(shares))
    chunks = build_chunks(family, stage_modules, placement.stages_on(dist.get_rank()))
    torch.manual_seed(0)
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=torch.float32)
        for parameter in chunk.parameters():
            parameter.data.normal_(std=0.02)
    apply_compute_options(chunks, len(shares), ComputeOptions(recompute=case["recompute"]))
    timetable = find_timetable(case["schedule"], placement, cut.num_microbatches)
    schedule = build_schedule(timetable, chunks, plan_stage_metadata(family, stage_modules, torch.float32), cut)
    training = Training(
        policy=POLICIES["fp32"], microbatch=1, seq_len=SEQ_LEN, recompute=case["recompute"], host_memory="compact"
    )
    table = timetable.planned(cut.num_microbatches)
    planned = estimate_memory(model_shape(CONFIG), stage_modules, table, training).ranks[dist.get_rank()]
    first, second = (
        padded_batch(seed, size=cut.global_batch, seq_len=SEQ_LEN, vocab_size=CONFIG["vocab_size"]) for seed in (0, 1)
    )
    schedule.train(first)
    schedule.evaluate(first)
    peaks = []
    for _ in range(_NUM_STEPS):
        for chunk in chunks:
            chunk.zero_grad()
        peaks.append(peak_nbytes(schedule.train, second))
    evaluation_peak = max(peak_nbytes(schedule.evaluate, second) for _ in range(_NUM_STEPS))
    return {"planned": asdict(planned), "peak": max(peaks), "evaluation_peak": evaluation_peak}


def peak_nbytes(run: Callable[[Batch], object], batch: Batch) -> int:
    """Return the most bytes allocated at once in a step or an evaluation, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(batch)
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def main(cases: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in json.loads(cases.read_text()):
        (out / f"{case['name']}-{dist.get_rank()}.json").write_text(json.dumps(run_case(case)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
