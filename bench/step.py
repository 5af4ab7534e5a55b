"""Time a step of `runner launch` beside a bare loop over torch.distributed.pipelining, on two pipeline ranks.

    python bench/step.py [--runs 5] [--rows "mid 1F1B" ...] [--out bench/results/step.json] [--folder DIR]

Both run as their users start them, from the same packed folder: `runner launch` with its defaults, and a script under
torchrun that builds the same modules and runs torch's schedule, `clip_grads_with_norm_` and AdamW in float32. Both know
the mean loss on every rank after each step. A turn has the runner once and the bare loop twice, so that the loop's own
spread between two runs is in the file; they rotate. A run's step is the median between the ends of its steps, without
the first ones. Nothing counts unless both have the same losses in the first steps of every turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure

TINY = {
    **measure.LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NUM_COMPARED, SAME = 5, 1e-4  # steps of which losses are compared, and their relative difference
LR, BETAS, EPS, DECAY, MAX_NORM = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0  # the runner's defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A model, a schedule and the number of microbatches of one row each, and how many steps a run takes."""

    config: Mapping[str, Any]
    seq_len: int
    schedule: str
    layout: str
    microbatches: int
    num_steps: int
    num_warm: int


ROWS = {
    "mid 1F1B": Row(
        config=measure.LLAMA, seq_len=128, schedule="1F1B", layout="pp=2", microbatches=8, num_steps=6, num_warm=2
    ),
    "mid Interleaved1F1B": Row(
        config=measure.LLAMA, seq_len=128, schedule="Interleaved1F1B", layout="pp=2,vpp=2", microbatches=8,
        num_steps=6, num_warm=2,
    ),
    "tiny 1F1B": Row(
        config=TINY, seq_len=64, schedule="1F1B", layout="pp=2", microbatches=8, num_steps=60, num_warm=10
    ),
    "tiny 1F1B, 64 microbatches": Row(
        config=TINY, seq_len=64, schedule="1F1B", layout="pp=2", microbatches=64, num_steps=16, num_warm=4
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """The seconds of a step, and the losses of the first ones."""

    step_s: float
    losses: tuple[float, ...]

    @classmethod
    def of(cls, row: Row, lines: Sequence[Mapping[str, float]]) -> Ran:
        ends_s = [line["time"] for line in lines[row.num_warm - 1 :]]
        return cls(
            step_s=statistics.median(after - before for before, after in pairwise(ends_s)),
            losses=tuple(line["loss"] for line in lines[:NUM_COMPARED]),
        )


def main() -> None:
    parser = measure.options_of(__doc__, runs=5)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a row, at most, once it has a turn")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(Path(options.rank))
        return
    load = [measure.load_average()]
    rows = {}
    for name in options.rows:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-step-") as scratch:
            rows[name] = compare(ROWS[name], Path(scratch), options.runs, options.seconds)
        print(name, rows[name], file=sys.stderr)
    result = {
        "what": "an optimizer step of a Llama on two pipeline ranks by runner launch with its defaults, and by a bare "
        "loop over torch's schedule with clipping and AdamW, in rotating order; bare again: the loop's own spread",
        **measure.circumstances(),
        "load_average": [*load, measure.load_average()],
        "models": {"mid": measure.LLAMA, "tiny": TINY},
        "rows": rows,
    }
    measure.write_result(result, options.out)


def compare(row: Row, root: Path, num_turns: int, most_s: float) -> dict[str, Any]:
    """Run the contenders of one row in turn."""
    measure.write_llama(root / "model", row.config)
    measure.run_quietly(
        [*measure.RESHARD, "pack", str(root / "model"), "--layout", row.layout, "--out", str(root / "packed")]
    )
    loop = partial(bare, row, root)
    ways = {"runner": partial(runner, row, root), "bare": loop, "again": loop}
    turns = measure.take_turns(ways, num_turns, num_warmup=0, most_s=most_s)
    for turn in turns:
        for name in ("bare", "again"):
            same = map(partial(math.isclose, rel_tol=SAME), turn["runner"].losses, turn[name].losses)
            assert all(same), turn
    taken = {name: [turn[name].step_s for turn in turns] for name in turns[0]}
    spread = [again / first for again, first in zip(taken["again"], taken["bare"], strict=True)]
    of_runner = [
        ours / statistics.fmean((first, again))
        for ours, first, again in zip(taken["runner"], taken["bare"], taken["again"], strict=True)
    ]
    return {
        "ms of runner": round(statistics.median(taken["runner"]) * 1e3, 2),
        "ms of bare": round(statistics.median([*taken["bare"], *taken["again"]]) * 1e3, 2),
        "ratio to bare": round(statistics.median(of_runner), 3),
        "lowest": round(min(of_runner), 3),
        "highest": round(max(of_runner), 3),
        "turns": len(turns),
        "bare again to bare": round(statistics.median(spread), 3),
        "bare lowest": round(min(spread), 3),
        "bare highest": round(max(spread), 3),
    }


def runner(row: Row, root: Path) -> Ran:
    with tempfile.TemporaryDirectory(dir=root) as log:
        measure.run_runner(
            "launch", root / "packed", "--nproc-per-node", 2, "--log-dir", log, "--", "--data", "synthetic",
            "--seq-len", row.seq_len, "--global-batch", row.microbatches, "--microbatch", 1, "--steps", row.num_steps,
            "--schedule", row.schedule, "--no-self-check",
        )  # fmt: skip
        lines = [json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]
    return _shown("runner", Ran.of(row, [line for line in lines if "loss" in line]))


def bare(row: Row, root: Path) -> Ran:
    with tempfile.TemporaryDirectory(dir=root) as folder:
        job = Path(folder, "job.json")
        name = next(name for name, other in ROWS.items() if other is row)
        job.write_text(json.dumps({"row": name, "packed": str(root / "packed"), "out": f"{folder}/steps.json"}))
        measure.run_ranks(2, __file__, "--rank", str(job))
        lines = json.loads(Path(folder, "steps.json").read_text())
    return _shown("bare", Ran.of(row, lines))


def _shown(name: str, ran: Ran) -> Ran:
    print(f"{name}: {ran.step_s * 1e3:.2f} ms a step", file=sys.stderr, flush=True)
    return ran


def rank(job_file: Path) -> None:
    """Run one rank of the bare loop."""
    import torch
    from torch import distributed as dist

    job = json.loads(job_file.read_text())
    row = ROWS[job["row"]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = _loop(row, Path(job["packed"]))
    lines = []
    for batch in _batches(row, Path(job["packed"])):
        loss = step(batch)
        lines.append({"loss": loss, "time": time.time()})
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(lines))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # at the end of an interpreter, threads of gloo abort it at times


def _batches(row: Row, packed: Path) -> list[Any]:
    """Return the batches on which `runner launch` trains."""
    from runner.config.schema import BatchOptions, DataOptions
    from runner.data.sequences import read_batches

    cut = BatchOptions(seq_len=row.seq_len, global_batch=row.microbatches, microbatch=1)
    data = DataOptions(sources=("synthetic",))
    batches = read_batches(data, cut, folder=packed, vocab_size=row.config["vocab_size"])
    return [next(batches) for _ in range(row.num_steps)]


def _loop(row: Row, packed: Path) -> Any:
    """Return a function that takes a step on a batch, and returns its loss on every rank."""
    import torch
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    chunks, family, num_stages = _load(row, packed)
    tokens = torch.empty(1, row.seq_len, dtype=torch.int64)
    hidden, logits = (
        torch.empty(1, row.seq_len, width, requires_grad=True) for width in (family.hidden_size, family.vocab_size)
    )
    last = num_stages - 1
    stages: list[Any] = [
        PipelineStage(
            chunk.body, chunk.stage, num_stages, torch.device("cpu"), input_args=hidden if chunk.stage else tokens,
            output_args=logits if chunk.stage == last else hidden,
        )
        for chunk in chunks
    ]  # fmt: skip

    def loss_of(logits: torch.Tensor, labels: torch.Tensor, num_tokens: int) -> torch.Tensor:
        summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return summed / num_tokens

    kind = get_schedule_class(row.schedule)
    several: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(several, row.microbatches, loss_fn=loss_of, scale_grads=False)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    adamw = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    is_first, is_last = (any(chunk.stage == end for chunk in chunks) for end in (0, last))
    total = torch.zeros(1)

    def step(batch: Any) -> float:
        adamw.zero_grad()
        losses: list[torch.Tensor] = []
        args = (batch.tokens,) if is_first else ()
        targets = {
            "target": batch.labels, "losses": losses, "loss_kwargs": {"num_tokens": batch.num_tokens}
        } if is_last else {}  # fmt: skip
        schedule.step(*args, **targets, return_outputs=False)
        square = get_total_norm([parameter.grad for parameter in parameters]).square()
        dist.all_reduce(square)
        clip_grads_with_norm_(parameters, MAX_NORM, square.sqrt())
        adamw.step()
        total.fill_(sum(loss.item() for loss in losses))
        dist.all_reduce(total)
        return total.item()

    return step


def _load(row: Row, packed: Path) -> tuple[list[Any], Any, int]:
    """Return this rank's stages with their weights, the model's family and the number of stages."""
    import torch
    from safetensors import safe_open
    from torch import distributed as dist

    from runner.models import family_for
    from runner.pipeline.chunk import build_chunks, materialize, named_hf_parameters

    manifest = json.loads((packed / "manifest.json").read_text())
    shards = json.loads((packed / "model.safetensors.index.json").read_text())["weight_map"]
    modules = tuple(tuple(stage["modules"]) for stage in manifest["stages"])
    family = family_for(json.loads((packed / "config.json").read_text()), max_seq_len=row.seq_len)
    chunks = list(build_chunks(family, modules, tuple(range(dist.get_rank(), len(modules), 2))))
    for chunk in chunks:
        materialize(chunk, device=torch.device("cpu"), dtype=torch.float32)
        for fqn, parameter in named_hf_parameters(chunk):
            with safe_open(packed / shards[fqn], "pt") as shard:
                parameter.data.copy_(shard.get_tensor(fqn))
    return chunks, family, len(modules)


if __name__ == "__main__":
    main()
